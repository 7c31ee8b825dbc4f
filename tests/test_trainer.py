"""The Python interface: what a step reports, what it leaves behind, and what changes nothing."""

from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from trainers import export, trainer_for
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer
from greedysnake.engine.prepared import PreparedPlan
from greedysnake.engine.unit_store import read_unit_weights
from greedysnake.errors import NonFiniteError
from greedysnake.models.streaming import StreamedModel


def poison_gradients(trainer: Trainer, monkeypatch, unit: int) -> None:
    """Let a unit's backward end with a gradient that is not finite, as an overflow would."""
    original = StreamedModel.backward

    def backward(self, at, micro_batch, weights):
        original(self, at, micro_batch, weights)
        if at == unit:
            name = trainer.skeleton.layouts[unit].parameters[0].name
            trainer.skeleton.parameters[name].grad.view(-1)[0] = float("inf")

    monkeypatch.setattr(StreamedModel, "backward", backward)


def test_a_step_reports_what_it_did(tmp_path):
    batches = random_batches(3)
    with trainer_for(tmp_path) as trainer:
        results = [trainer.step(batch) for batch in batches]
        assert trainer.steps_done == 3
    assert [result.step for result in results] == [1, 2, 3]
    for result, batch in zip(results, batches, strict=True):
        assert result.tokens == sum(part["input_ids"].numel() for part in batch)
        assert result.seconds > 0
        assert result.ssd_read_bytes > 0
        assert result.host_peak_bytes > 0
        assert {event.kind for event in result.events} >= {"forward", "head", "backward", "total_norm"}
    assert results[1].ssd_write_bytes > results[0].ssd_write_bytes  # delayed updates begin with the second step


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("clipping", [None, 1.0])
@pytest.mark.parametrize(
    "keeping", [{}, {"snapshot_every": 5}, {"resident_weights": 0.5, "resident_state": 0.5}], ids=str
)
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, monkeypatch, share, clipping, keeping):
    batches = random_batches(4)
    settings = AdamW(lr=1e-2, max_grad_norm=clipping)

    def run(folder: Path, poisoned: int | None) -> dict[str, torch.Tensor]:
        with trainer_for(folder, delayed_share=share, optimizer=settings, **keeping) as trainer:
            for index, batch in enumerate(batches):
                with monkeypatch.context() as patch:
                    if index == poisoned:
                        poison_gradients(trainer, patch, unit=2)
                        result = trainer.step(batch)
                        assert result.skipped is not None
                        assert "norm" in result.skipped
                    elif not (poisoned is None and index == 2):
                        assert trainer.step(batch).skipped is None
        return weights_in(folder / "store")

    skipping = run(tmp_path / "skipping", poisoned=2)
    without = run(tmp_path / "without", poisoned=None)  # the same run, had that batch never been
    assert [name for name in without if not torch.equal(without[name], skipping[name])] == []


def test_a_loss_that_is_not_finite_is_skipped_too_and_stops_the_run_when_it_goes_on(tmp_path, monkeypatch):
    batch = random_batches(1)[0]
    with trainer_for(tmp_path, max_skipped_steps=3) as trainer:
        trainer.step(batch)
        original = StreamedModel.head
        monkeypatch.setattr(StreamedModel, "head", lambda self, m: original(self, m) * float("nan"))
        assert "loss" in trainer.step(batch).skipped
        trainer.step(batch)
        with pytest.raises(NonFiniteError, match="3 steps in a row"):
            trainer.step(batch)
        monkeypatch.undo()
        assert trainer.step(batch).skipped is None


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "keeping", [{}, {"resident_weights": 0.5, "resident_state": 0.5, "snapshot_every": 1}], ids=str
)
def test_the_state_after_a_step_is_committed_in_the_next_one(tmp_path, share, keeping):
    trainer = trainer_for(tmp_path, delayed_share=share, optimizer=AdamW(lr=1e-2, max_grad_norm=None), **keeping)
    batches = random_batches(3)
    trainer.step(batches[0])
    trainer.step(batches[1])
    assert trainer.last_snapshot == 1
    trainer.step(batches[2])
    assert trainer.last_snapshot == 2
    trainer._store.close()  # as a crash would leave it: nothing flushed, nothing committed any more
    found = weights_in(tmp_path / "store")
    with trainer_for(tmp_path / "two", delayed_share=0.0, optimizer=AdamW(lr=1e-2, max_grad_norm=None)) as other:
        other.step(batches[0])
        other.step(batches[1])
    expected = weights_in(tmp_path / "two" / "store")
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_an_interrupt_in_the_middle_keeps_the_last_commit(tmp_path, monkeypatch):
    batches = random_batches(2)
    trainer = trainer_for(tmp_path, delayed_share=0.0, optimizer=AdamW(lr=1e-2, max_grad_norm=None))
    trainer.step(batches[0])
    expected = export(trainer, tmp_path / "one")
    original = StreamedModel.backward

    def interrupted(self, unit, micro_batch, weights):
        if unit == 1:
            raise KeyboardInterrupt
        original(self, unit, micro_batch, weights)

    monkeypatch.setattr(StreamedModel, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches[1])
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.step(batches[1])
    trainer.close()
    found = weights_in(tmp_path / "store")
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_an_interrupt_between_a_step_and_its_commit_keeps_the_last_commit(tmp_path, monkeypatch):
    batches = random_batches(2)
    trainer = trainer_for(tmp_path, delayed_share=1.0)
    trainer.step(batches[0])
    trainer.snapshot()
    before = weights_in_open(trainer)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_finish_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batches[1])
    trainer.close()
    found = weights_in(tmp_path / "store")
    assert [name for name in found if not torch.equal(found[name], before[name])] == []


def weights_in_open(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights in the store as they are now, delayed updates not applied."""
    return {
        name: tensor.clone()
        for unit, layout in enumerate(trainer.skeleton.layouts)
        for name, tensor in read_unit_weights(trainer._store, unit, layout).items()
    }


def test_evaluation_is_the_models_own_loss_and_changes_nothing(tmp_path):
    held_out = [part for step in random_batches(3, seed=9) for part in step]
    batches = random_batches(4)
    with trainer_for(tmp_path / "a", "gpt2_dropout", delayed_share=0.5) as trainer:
        for batch in batches[:2]:
            trainer.step(batch)
        loss = trainer.evaluate(held_out, at_once=5)
        model = AutoModelForCausalLM.from_pretrained(_saved(trainer, tmp_path / "mid")).eval()
        for batch in batches[2:]:
            trainer.step(batch)
    with trainer_for(tmp_path / "b", "gpt2_dropout", delayed_share=0.5) as trainer:
        for batch in batches:
            trainer.step(batch)
    total = tokens = 0
    with torch.no_grad():
        for part in held_out:
            count = int((part["labels"][:, 1:] != -100).sum())
            total += model(**part).loss.item() * count
            tokens += count
    assert loss == pytest.approx(total / tokens, rel=1e-5)
    with_evaluation, without = weights_in(tmp_path / "a" / "store"), weights_in(tmp_path / "b" / "store")
    assert [name for name in without if not torch.equal(without[name], with_evaluation[name])] == []


def test_an_evaluation_takes_as_many_micro_batches_at_once_as_the_plan_has_memory_for(tmp_path, monkeypatch):
    groups, original = [], PreparedPlan.evaluation_schedule
    monkeypatch.setattr(
        PreparedPlan, "evaluation_schedule", lambda s, count: (groups.append(count), original(s, count))[1]
    )
    held_out = random_batches(1, 5, seed=9)[0]
    with trainer_for(tmp_path) as trainer:
        trainer.step(random_batches(1, 2)[0])
        assert trainer.evaluate(held_out) == pytest.approx(trainer.evaluate(held_out, at_once=5), rel=1e-6)
    assert groups == [2, 2, 1, 5]


def test_an_evaluation_that_is_broken_off_changes_nothing(tmp_path, monkeypatch):
    batches = random_batches(2)

    def interrupted(self, micro_batch):
        raise KeyboardInterrupt

    with trainer_for(tmp_path / "a", delayed_share=0.5) as trainer:
        trainer.step(batches[0])
        with monkeypatch.context() as patch:
            patch.setattr(StreamedModel, "head", interrupted)
            with pytest.raises(KeyboardInterrupt):
                trainer.evaluate(batches[1])
        trainer.step(batches[1])
    assert trainer.last_snapshot == 2
    with trainer_for(tmp_path / "b", delayed_share=0.5) as trainer:
        for batch in batches:
            trainer.step(batch)
    broken_off, without = weights_in(tmp_path / "a" / "store"), weights_in(tmp_path / "b" / "store")
    assert [name for name in without if not torch.equal(without[name], broken_off[name])] == []


def _saved(trainer: Trainer, folder: Path) -> Path:
    trainer.save_pretrained(folder)
    return folder


def test_vertical_and_horizontal_agree_with_dropout(tmp_path):
    batches = random_batches(2)
    found = {}
    for schedule in ("vertical", "horizontal"):
        with trainer_for(tmp_path / schedule, "gpt2_dropout", schedule=schedule, snake=False) as trainer:
            for batch in batches:
                trainer.step(batch)
        found[schedule] = weights_in(tmp_path / schedule / "store")
    assert all(torch.equal(found["vertical"][name], found["horizontal"][name]) for name in found["vertical"])


def test_batches_may_change_size_between_steps(tmp_path):
    with trainer_for(tmp_path, delayed_share=0.5, boundaries_on_ssd=1.0, gradients="ssd") as trainer:
        for count in (2, 4, 1, 4):
            assert trainer.step(random_batches(1, count)[0]).skipped is None
        longer = torch.randint(3, 128, (3, 40))
        assert trainer.step([{"input_ids": longer, "labels": longer}]).skipped is None


def test_random_weights_do_not_depend_on_grouping_and_the_callers_random_state_stays(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for layers in (1, 2):
        with trainer_for(tmp_path / str(layers), "gpt2_dropout", layers_per_unit=layers, snake=False) as trainer:
            trainer.step(random_batches(1)[0])
    assert torch.equal(torch.rand(3), expected)
    one, two = weights_in(tmp_path / "1" / "store"), weights_in(tmp_path / "2" / "store")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_loaded_model_and_its_folder_start_the_same_run(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("deepseek_v3")).float()
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.normal_()
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    batch = random_batches(1)[0]
    found = []
    for index, source in enumerate((model, tmp_path / "model")):
        with Trainer(source, tmp_path / f"store{index}", dtype="float32", chunk_elements=8192) as trainer:
            trainer.save_pretrained(tmp_path / f"same{index}")
            trainer.step(batch)
            found.append(export(trainer, tmp_path / f"out{index}"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "same1").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_frozen_parameters_of_a_loaded_model_stay_as_they_are(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("llama")).float()
    frozen = [name for name, _ in model.named_parameters() if ".layers.2." in name or name.endswith("k_proj.weight")]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    settings = AdamW(lr=1e-2, decay_norms_and_biases=True, max_grad_norm=1.0)
    with Trainer(model, tmp_path / "store", dtype="float32", chunk_elements=8192, optimizer=settings) as trainer:
        for batch in random_batches(2):
            trainer.step(batch)
        after = export(trainer, tmp_path / "after")
    assert all(torch.equal(after[name], parameter) == (name in frozen) for name, parameter in model.named_parameters())
