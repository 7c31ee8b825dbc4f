"""Updates make way for boundaries that come from SSD: the same work, as safe, the same numbers, sooner."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_machines import MACHINES, query
from test_schedule import CHOICES, shapes

from greedysnake import AdamW, Trainer
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.query import Case, simulate_case
from greedysnake.plan.slots import DEEP, WIDE, with_slots
from greedysnake.schedule import Choices, Operation, build_vertical, check_schedule


def what(operation: Operation) -> tuple:
    return (operation.kind, operation.unit, operation.micro_batch, operation.chunk, operation.reads, operation.writes)


@settings(max_examples=100, deadline=None)
@given(shapes(), CHOICES, st.integers(5, 8), st.sampled_from([0.5, 1.0]), st.booleans())
def test_the_same_operations_in_a_safe_order(shape, choices, micro_batches, on_ssd, pending):
    shape = replace(shape, micro_batches=micro_batches)
    choices = replace(choices, boundaries_on_ssd=on_ssd, boundaries_on_device=0.0)
    passing, plain = (
        build_vertical(shape, replace(choices, boundaries_first=first), pending=pending) for first in (True, False)
    )
    check_schedule(passing)
    assert Counter(map(what, passing.operations)) == Counter(map(what, plain.operations))
    for unit in range(len(shape.units)):
        assert passing.backward_order(unit) == plain.backward_order(unit)


@pytest.mark.parametrize(
    ("name", "slots", "most"),
    # where the disks limit everything, nothing is gained, and a little lost: the planner tries both
    [("accelerator", WIDE, 0.95), ("accelerator", DEEP, 1.0), ("cpu", WIDE, 1.0), ("slow disk", WIDE, 1.05)],
)
def test_computation_waits_less_for_boundaries(name, slots, most):
    hardware = MACHINES[name]
    choices = with_slots(Choices(separate_device=hardware.separate_device, boundaries_on_ssd=1.0), slots)
    case = Case(batch=BatchShape(micro_batches=12, rows=1, tokens=1024), layers_per_unit=1, choices=choices)
    passing, plain = (
        simulate_case(case.with_choices(boundaries_first=first), query(hardware)).step.seconds
        for first in (True, False)
    )
    assert passing <= most * plain * (1 + 1e-3)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_same_numbers(tmp_path, device):
    batches = random_batches(2, micro_batches=6)

    def trained(name: str, on_ssd: float) -> dict[str, torch.Tensor]:
        with Trainer(
            small_config("llama"),
            tmp_path / name,
            dtype="float32",
            chunk_elements=4096,
            optimizer=AdamW(lr=1e-2, max_grad_norm=None),
            device=device,
            delayed_share=0.3,
            boundaries_on_ssd=on_ssd,
        ) as trainer:
            for batch in batches:
                trainer.step(batch)
        return weights_in(tmp_path / name)

    plain, passing = trained("plain", 0.0), trained("passing", 1.0)
    assert [key for key in plain if not torch.equal(plain[key], passing[key])] == []
