"""float16 training against a plain loop with float16 weights, float32 masters and torch's GradScaler."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from plain_masters import MasterTrainer
from torch import Tensor
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer
from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import durable_extents
from greedysnake.errors import NonFiniteError
from greedysnake.models.streaming import StreamedModel
from greedysnake.optim import LossScaling
from greedysnake.storage import aligned_empty

RESTLESS = LossScaling(initial=2.0**20, growth_interval=1)  # no two steps in a row have the same scale
STEPS = 9

WAYS: list[dict[str, Any]] = [
    {"delayed_share": 0.0},
    {"delayed_share": 0.4},
    {"delayed_share": 1.0},
    {"delayed_share": 0.4, "schedule": "horizontal", "gradients": "ssd"},
    {"delayed_share": 0.4, "device": "emulated", "boundaries_on_ssd": 1.0},
    {"delayed_share": 0.4, "snapshot_every": 5, "resident_state": 0.5},
]


def two_layers(name: str) -> dict[str, int]:
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of models in float16 with untied embeddings, by name."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            made = tmp_path_factory.mktemp(name)
            config = small_config(name, tie_word_embeddings=False, **two_layers(name))
            with Trainer(config, made / "store", dtype="float16") as trainer:
                trainer.save_pretrained(made / "model")
            folders[name] = made / "model"
        return folders[name]

    return folder


def train_both(model: Path, folder: Path, clipping: float | None, way: dict[str, Any]) -> None:
    """Streamed and plain runs: the same bits, under a scale that makes about every other step overflow."""
    settings = AdamW(lr=2e-3, max_grad_norm=clipping)
    plain = MasterTrainer(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16), settings, RESTLESS)
    skipped = clipped = 0
    with Trainer(
        model,
        folder / "store",
        optimizer=settings,
        dtype="float16",
        loss_scaling=RESTLESS,
        snake=False,
        chunk_elements=8192,
        **way,
    ) as trainer:
        for batch in random_batches(STEPS):
            scale, loss = plain.scaler.get_scale(), plain.step(batch)
            result = trainer.step(batch)
            assert result.loss_scale == scale
            if plain.scaler.get_scale() < scale:
                skipped += 1
                assert f"at a loss scale of {scale:,.0f}" in result.skipped
            else:
                assert result.skipped is None
                assert result.loss == pytest.approx(loss, rel=1e-6)
                clipped += result.clipped
        trainer.save_pretrained(folder / "after")
    assert 2 <= skipped <= STEPS - 3
    assert (clipped > 0) == (clipping is not None)
    ours = AutoModelForCausalLM.from_pretrained(folder / "after", dtype=torch.float16).state_dict()
    theirs = plain.model.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("clipping", [None, 0.5])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_of_running_a_step_gives_the_bits_of_a_plain_loop(way, clipping, tmp_path, saved):
    train_both(saved("llama"), tmp_path, clipping, way)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral"])
def test_other_architectures_give_the_bits_of_a_plain_loop(name, tmp_path, saved):
    train_both(saved(name), tmp_path, None, {"delayed_share": 0.4})


def test_tied_embeddings_come_out_the_same_in_every_way(tmp_path):
    found = []
    for number, way in enumerate(WAYS):
        with Trainer(
            small_config("llama_tied", **two_layers("llama_tied")),
            tmp_path / str(number),
            optimizer=AdamW(lr=2e-3, max_grad_norm=0.5),
            dtype="float16",
            loss_scaling=RESTLESS,
            snake=False,
            chunk_elements=8192,
            **way,
        ) as trainer:
            skipped = [trainer.step(batch).skipped for batch in random_batches(STEPS)]
        assert None in skipped[-4:]
        found.append(weights_in(tmp_path / str(number)))
    for other in found[1:]:
        assert [name for name in other if not torch.equal(found[0][name], other[name])] == []


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, masters and moments in the store."""
    state = {}
    for key, size in durable_extents(trainer.skeleton.layouts).items():
        state[key] = aligned_empty(size)
        trainer._store.read(key, state[key]).wait()
    return state


@pytest.mark.parametrize("way", [{"delayed_share": 0.0}, {"delayed_share": 0.4}, {"delayed_share": 1.0}], ids=str)
def test_a_scale_that_is_too_large_falls_without_a_change_of_state_until_training_begins(way, tmp_path, saved):
    batch = random_batches(1)[0]
    with Trainer(
        saved("llama"),
        tmp_path / "store",
        optimizer=AdamW(lr=3e-3, max_grad_norm=None),
        dtype="float16",
        loss_scaling=LossScaling(initial=2.0**30),
        max_skipped_steps=2,  # the search takes more steps
        chunk_elements=8192,
        **way,
    ) as trainer:
        before, results = whole_state(trainer), [trainer.step(batch)]
        while results[-1].skipped is not None:
            after = whole_state(trainer)
            assert [key for key in before if not torch.equal(before[key], after[key])] == []
            assert "the gradient" in results[-1].skipped
            results.append(trainer.step(batch))
        assert [result.loss_scale for result in results] == [2.0 ** (30 - step) for step in range(len(results))]
        assert len(results) > 10
        results += [trainer.step(batch) for _ in range(10)]
        assert results[-1].skipped is None
        assert results[-1].loss < results[-11].loss - 0.5


def test_an_overflow_at_the_smallest_scale_counts_and_stops_the_run(tmp_path, monkeypatch, saved):
    original = StreamedModel.backward

    with Trainer(
        saved("llama"),
        tmp_path / "store",
        dtype="float16",
        loss_scaling=LossScaling(initial=16.0),
        max_skipped_steps=3,
    ) as trainer:

        def overflowing(self, unit, micro_batch, weights):
            original(self, unit, micro_batch, weights)
            trainer.skeleton.parameters[trainer.skeleton.layouts[unit].parameters[0].name].grad.fill_(float("inf"))

        monkeypatch.setattr(StreamedModel, "backward", overflowing)
        batch = random_batches(1)[0]
        assert [trainer.step(batch).loss_scale for _ in range(6)] == [16.0, 8.0, 4.0, 2.0, 1.0, 1.0]
        with pytest.raises(NonFiniteError, match="3 steps in a row"):
            trainer.step(batch)


def test_a_loss_that_is_not_finite_counts_at_any_scale(tmp_path, monkeypatch, saved):
    original = StreamedModel.head
    monkeypatch.setattr(StreamedModel, "head", lambda self, m: original(self, m) * float("nan"))
    with Trainer(saved("llama"), tmp_path / "store", dtype="float16", max_skipped_steps=2) as trainer:
        batch = random_batches(1)[0]
        assert "the loss of micro-batch" in trainer.step(batch).skipped
        with pytest.raises(NonFiniteError, match="2 steps in a row"):
            trainer.step(batch)


def test_the_scale_is_committed_with_the_state_that_it_belongs_to(tmp_path, saved):
    batches = random_batches(4)
    scaling = LossScaling(initial=2.0**20, growth_interval=100)
    trainer = Trainer(saved("llama"), tmp_path / "store", dtype="float16", loss_scaling=scaling)
    while trainer.step(batches[0]).skipped is not None:
        pass
    last = [trainer.step(batch).loss_scale for batch in batches[1:]][-1]
    trainer._store.close()  # as a crash would leave it
    store, _, contents = open_committed([tmp_path / "store"])
    store.close()
    assert contents["loss_scale"]["scale"] == last < 2.0**20
    assert contents["loss_scale"]["good_steps"] == 3  # of the step before, committed in the last one
