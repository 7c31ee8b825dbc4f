"""Micro-batches in groups: when they are planned, what they change, and that a run keeps to them."""

import re
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from made_up_machines import GIB, MACHINES, query

from greedysnake import AdamW, Trainer
from greedysnake.errors import ConfigError, MemoryBudgetError
from greedysnake.models.skeleton import build_skeleton
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.placement import make_plan
from greedysnake.plan.query import fits, smaller_groups
from greedysnake.plan.request import PlanRequest
from greedysnake.plan.roofline import best_of_few
from greedysnake.plan.search import search

MICRO_BATCHES = 8


def trainer_in(folder: Path, **settings) -> Trainer:
    usual = {"dtype": "float32", "optimizer": AdamW(lr=1e-2), "chunk_elements": 8192, "kept_activations": 0.0}
    return Trainer(small_config("llama"), folder / "store", **{**usual, **settings})


def together(trainer: Trainer) -> int:
    assert trainer.plan is not None
    return trainer.plan.choices.together(trainer.plan.shape)


def least_device_memory(group_size: int) -> int:
    """Bytes of the device that a step in groups of so many needs at least, with its boundaries there."""
    skeleton = build_skeleton(small_config("llama"), dtype=torch.float32, chunk_elements=8192)
    batch = BatchShape(micro_batches=MICRO_BATCHES, rows=2, tokens=12)
    asked = PlanRequest(
        separate_device=True, host_memory=4 * GIB, boundaries_on_device=1.0, kept_activations=0.0, group_size=group_size
    )

    def fits_in(device_memory: int) -> bool:
        try:
            make_plan(skeleton, batch, replace(asked, device_memory=device_memory))
        except MemoryBudgetError:
            return False
        return True

    return bisect_left(range(GIB), True, key=fits_in)


def test_groups_halve_down_to_single_micro_batches():
    assert smaller_groups(8) == [4, 2, 1]
    assert smaller_groups(7) == [4, 2, 1]
    assert smaller_groups(1) == []


def test_a_batch_that_does_not_fit_as_one_is_cut_into_groups_and_the_run_keeps_to_them(tmp_path):
    batches = random_batches(3, MICRO_BATCHES)
    in_fours = least_device_memory(4)
    assert in_fours < least_device_memory(MICRO_BATCHES)
    little = {"device": "emulated", "device_memory": in_fours, "boundaries_on_device": 1.0}
    with pytest.raises(MemoryBudgetError, match="device memory"):
        trainer_in(tmp_path / "short", **little, group_size=MICRO_BATCHES).step(batches[0])
    with trainer_in(tmp_path, **little) as trainer:
        trainer.step(batches[0])
        assert together(trainer) == 4
        assert any("groups of 4 of 8" in reason for reason in trainer.plan.reasons)
    with Trainer.resume(tmp_path / "store", device_memory=None) as trainer:  # where all would fit
        trainer.step(batches[1])
        assert together(trainer) == 4
        trainer.step(batches[2][:3])  # another batch is another question
        assert together(trainer) == 3
    with Trainer.resume(tmp_path / "store", device_memory=None, group_size=2) as trainer:
        trainer.step(batches[2])
        assert together(trainer) == 2


def test_groups_that_no_longer_fit_are_made_smaller(tmp_path):
    batches = random_batches(2, MICRO_BATCHES)
    with trainer_in(tmp_path, device="emulated", boundaries_on_device=1.0) as trainer:
        trainer.step(batches[0])
        assert together(trainer) == MICRO_BATCHES
    little = {"device_memory": least_device_memory(2), "boundaries_on_device": 1.0}
    with Trainer.resume(tmp_path / "store", **little) as trainer:
        trainer.step(batches[1])
        assert together(trainer) == 2
    with pytest.raises(MemoryBudgetError, match=r"or engine\.group_size"):
        trainer_in(tmp_path / "short", device="emulated", group_size=MICRO_BATCHES, **little).step(batches[0])


def test_an_evaluation_brings_no_more_through_the_model_than_a_step_does(tmp_path):
    batch = random_batches(1, MICRO_BATCHES)[0]
    for settings, expected in (({"schedule": "horizontal"}, 1), ({"group_size": 3}, 3)):
        with trainer_in(tmp_path / str(expected), **settings) as trainer:
            loss = trainer.evaluate(batch)  # before any step
            trainer.step(batch)
            assert together(trainer) == expected
            assert not any("groups" in reason for reason in trainer.plan.reasons) or expected == 3
            assert trainer.evaluate(batch) < loss


def test_in_their_natural_order_groups_change_no_bit(tmp_path):
    batches = random_batches(2, 5)
    found = []
    for number, settings in enumerate(({}, {"group_size": 2}, {"group_size": 1, "kept_activations": 1.0})):
        with trainer_in(tmp_path / str(number), snake=False, **settings) as trainer:
            for batch in batches:
                trainer.step(batch)
            loss = trainer.evaluate(batches[0])
        found.append((loss, weights_in(tmp_path / str(number) / "store")))
    (loss, weights), *others = found
    for other_loss, other in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert [name for name in weights if not torch.equal(weights[name], other[name])] == []


def test_groups_are_planned_where_they_are_faster():
    host = MACHINES["cpu"].model_copy(update={"host_memory": 16 * GIB})
    asked = query(host, micro_batches=32, rows=1, sequences=32, clipping=True)
    plan = search(asked)
    assert plan.case.choices.group_size is not None
    assert fits(plan.case.needs(asked), asked.limits)
    assert plan.step.seconds < search(replace(asked, group_size=32)).step.seconds


def test_a_group_size_that_is_given_stays():
    for size in (1, 3, 8):
        plan = search(query(MACHINES["cpu"], micro_batches=8, rows=1, sequences=8, group_size=size))
        assert plan.case.choices.together(plan.case.shape(query())) == size


def test_a_free_batch_is_one_group():
    assert search(query()).case.choices.group_size is None


def test_no_group_is_empty(tmp_path):
    with pytest.raises(ConfigError, match="group_size: must be at least 1, got 0"):
        trainer_in(tmp_path, group_size=0)
    with pytest.raises(ConfigError, match="group_size: must be 1 or None with the schedule 'horizontal', got 2"):
        trainer_in(tmp_path, group_size=2, schedule="horizontal")


def test_smaller_groups_are_proposed_where_they_fit():
    asked = query(MACHINES["accelerator"], rows=1, micro_batches=512, delayed_share=1.0, group_size=512)
    with pytest.raises(MemoryBudgetError, match=r"a group size of at most \d+") as refused:
        search(asked)
    most = int(re.findall(r"a group size of at most (\d+)", str(refused.value))[0])
    search(replace(asked, group_size=most))
    with pytest.raises(MemoryBudgetError):
        search(replace(asked, group_size=most + 1))


def test_the_roofline_has_a_batch_that_fits_in_groups_alone():
    asked = query(MACHINES["accelerator"], rows=1, delayed_share=1.0)
    batch = BatchShape(micro_batches=512, rows=1, tokens=1024)
    found = best_of_few(asked, batch)
    assert found is not None
    assert found.case.choices.group_size is not None
