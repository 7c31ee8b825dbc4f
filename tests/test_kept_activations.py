"""Activations that are kept for the backward, where keeping them does not go as planned."""

import logging
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from safetensors.torch import load_file
from torch import Tensor

from greedysnake import Trainer
from greedysnake.models.keeping import Keeper
from greedysnake.models.saved_tensors import SavedTensors
from greedysnake.models.skeleton import build_skeleton
from greedysnake.plan import placement
from greedysnake.plan.kept import saved_layer_bytes


def trained(
    folder: Path, kept: float, layers_per_unit: int = 1, name: str = "gpt2_dropout", dtype: str = "float32"
) -> dict[str, Tensor]:
    with Trainer(
        small_config(name),
        folder / "store",
        dtype=dtype,
        kept_activations=kept,
        layers_per_unit=layers_per_unit,
        chunk_elements=8192,
    ) as trainer:
        for batch in random_batches(2):
            trainer.step(batch)
        trainer.save_pretrained(folder / "model")
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("layers_per_unit", [1, 2])
def test_graphs_larger_than_planned_are_recomputed_bitwise_and_told_of_once(
    tmp_path, monkeypatch, caplog, layers_per_unit
):
    expected = trained(tmp_path / "recomputed", 0.0, layers_per_unit)
    monkeypatch.setattr(placement, "kept_unit_bytes", lambda skeleton, batch: 3000)
    with caplog.at_level(logging.WARNING, logger="greedysnake"):
        found = trained(tmp_path / "dropped", 1.0, layers_per_unit)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    told = [record.getMessage() for record in caplog.records if "of activations for the backward" in record.message]
    assert len(told) == 1
    assert "more than the 2.93 KiB that were planned for it" in told[0]


@pytest.mark.parametrize("name", ["gpt2_dropout", "mixtral", "gemma4_shared"])
def test_in_bfloat16_too_kept_activations_change_nothing(tmp_path, caplog, name):
    with caplog.at_level(logging.WARNING, logger="greedysnake"):
        recomputed, kept = (trained(tmp_path / str(share), share, 2, name, "bfloat16") for share in (0.0, 0.6))
    assert all(torch.equal(kept[key], recomputed[key]) for key in recomputed)
    assert not [record for record in caplog.records if "of activations for the backward" in record.message]


def test_a_unit_that_was_too_large_is_not_kept_again_until_more_is_planned():
    keeper = Keeper(SavedTensors(), ("embedding", "layer 0", "layer 1", "head"))
    weights = torch.zeros(8, dtype=torch.uint8)
    keeper.begin(100)
    kept = keeper.start(1, weights)
    assert kept is not None
    with keeper.saving(kept):
        _ = torch.ones(10, requires_grad=True).exp()
    assert keeper.fits(kept, 0)
    with keeper.saving(kept):
        _ = torch.ones(100, requires_grad=True).exp()
    assert not keeper.fits(kept, 0)
    assert keeper.start(1, weights) is None
    assert keeper.start(2, weights) is not None
    keeper.begin(100)
    assert keeper.start(1, weights) is None
    keeper.begin(1000)
    assert keeper.start(1, weights) is not None


def test_an_operator_that_cannot_tell_its_shapes_is_not_reported_as_an_error():
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        skeleton = build_skeleton(small_config("mixtral"), dtype=torch.float32)
        assert saved_layer_bytes(skeleton, 8) is None
    finally:
        logger.removeHandler(handler)
    assert records == []
    assert not logger.disabled
