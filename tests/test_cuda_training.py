"""Training on a GPU; skipped where torch sees none.

Exactness: with eager attention every kernel that a small Llama needs gives the same bits for the same inputs, and
norms and updates run on the CPU in both. So float32 must come out bitwise as in plain PyTorch on the same GPU.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in
from plain_masters import MasterTrainer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from greedysnake import AdamW, Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
ON_DEVICE = {"boundaries_on_device": 1.0, "boundaries_on_ssd": 0.0}
IN_HOST = {"boundaries_on_device": 0.0, "boundaries_on_ssd": 0.0}
ON_SSD = {"boundaries_on_device": 0.0, "boundaries_on_ssd": 1.0}
SPREAD = {"boundaries_on_device": 0.4, "boundaries_on_ssd": 0.3}

DEVICE = "cuda"
WAYS: list[dict[str, Any]] = [
    *({"delayed_share": share, **tier} for share in (0.0, 0.5, 1.0) for tier in (ON_DEVICE, IN_HOST, ON_SSD, SPREAD)),
    {"delayed_share": 0.5, "schedule": "horizontal", "gradients": "ssd", "kept_activations": 0.5},
    *({"delayed_share": 0.5, **SPREAD, "kept_activations": share} for share in (0.0, 0.4, 1.0)),
    {"delayed_share": 0.5, **IN_HOST, "layers_per_unit": 2, "resident_weights": 0.5, "resident_state": 0.5},
]

STEPS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def settings_with(clipping: float | None) -> AdamW:
    return AdamW(lr=2e-3, max_grad_norm=clipping)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model to start from, on the CPU, by dtype."""
    made: dict[str, PreTrainedModel] = {}

    def model(dtype: str) -> PreTrainedModel:
        if dtype not in made:
            folder = tmp_path_factory.mktemp(dtype)
            with Trainer(small_config("llama"), folder / "store", dtype=dtype) as trainer:
                trainer.save_pretrained(folder / "model")
            made[dtype] = AutoModelForCausalLM.from_pretrained(
                folder / "model", dtype=DTYPES[dtype], attn_implementation="eager"
            )
        return made[dtype]

    return model


@pytest.fixture(scope="module")
def plain(start):
    """Losses and weights of plain PyTorch on the GPU, by dtype and clipping."""
    made: dict[tuple[str, float | None], tuple[list[float], dict[str, Tensor]]] = {}

    def run(dtype: str, clipping: float | None) -> tuple[list[float], dict[str, Tensor]]:
        if (dtype, clipping) not in made:
            trainer = MasterTrainer(copy.deepcopy(start(dtype)).to(DEVICE), settings_with(clipping))
            losses = [trainer.step(batch) for batch in random_batches(STEPS)]
            made[dtype, clipping] = losses, {k: v.cpu() for k, v in trainer.model.state_dict().items()}
        return made[dtype, clipping]

    return run


def streamed(
    model: PreTrainedModel, folder: Path, dtype: str, clipping: float | None, way: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a streamed run on the GPU."""
    with Trainer(
        model,
        folder / "store",
        optimizer=settings_with(clipping),
        dtype=dtype,
        device=DEVICE,
        snake=False,
        chunk_elements=8192,
        **way,
    ) as trainer:
        losses = [trainer.step(batch).loss for batch in random_batches(STEPS)]
    return losses, weights_in(folder / "store")


@pytest.mark.parametrize("clipping", [None, 0.5])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_float32_is_bitwise_plain_pytorch(way, clipping, tmp_path, start, plain):
    losses, weights = plain("float32", clipping)
    our_losses, ours = streamed(start("float32"), tmp_path, "float32", clipping, way)
    assert our_losses == pytest.approx(losses, rel=1e-6)
    assert [name for name in weights if not torch.equal(ours[name], weights[name])] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", WAYS[3:6], ids=str)
def test_half_precision_is_plain_pytorch_within_rounding(way, dtype, tmp_path, start, plain):
    losses, weights = plain(dtype, 0.5)
    our_losses, ours = streamed(start(dtype), tmp_path, dtype, 0.5, way)
    assert our_losses == pytest.approx(losses, rel=2e-3)
    before = start(dtype).state_dict()
    for name, after in weights.items():
        moved = (after.float() - before[name].float()).norm()
        assert (ours[name].float() - after.float()).norm() <= 0.02 * moved, name


def test_dropout_and_tied_embeddings_come_out_the_same_in_every_way(tmp_path):
    config = small_config("gpt2_dropout", attn_implementation="eager")
    found = []
    for number, way in enumerate(WAYS):
        with Trainer(
            config, tmp_path / str(number), dtype="float32", device=DEVICE, snake=False, chunk_elements=8192, **way
        ) as trainer:
            for batch in random_batches(3):
                assert trainer.step(batch).skipped is None
        found.append(weights_in(tmp_path / str(number)))
    for other in found[1:]:
        assert [name for name in other if not torch.equal(found[0][name], other[name])] == []


def test_evaluation_and_export_after_training_on_the_gpu(tmp_path):
    batches = random_batches(4)
    with Trainer(small_config("llama"), tmp_path / "store", dtype="float32", device=DEVICE) as trainer:
        for batch in batches[:3]:
            trainer.step(batch)
        loss = trainer.evaluate(batches[3])
        trainer.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    total = tokens = 0
    with torch.no_grad():
        for part in batches[3]:
            count = int((part["labels"][:, 1:] != -100).sum())
            total += model(**part).loss.item() * count
            tokens += count
    assert loss == pytest.approx(total / tokens, rel=1e-4)


def test_larger_batches_and_a_second_run_reserve_anew(tmp_path):
    for name in ("first", "second"):
        with Trainer(small_config("llama"), tmp_path / name, dtype="float32", device=DEVICE) as trainer:
            for rows in (1, 3):
                ids = torch.randint(3, 128, (rows, 16), generator=torch.Generator().manual_seed(rows))
                assert trainer.step([{"input_ids": ids, "labels": ids}]).skipped is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_another_gpu_than_the_current_one_and_nothing_on_that(tmp_path):
    before, used = torch.cuda.current_device(), torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    with Trainer(small_config("gpt2_dropout"), tmp_path / "store", dtype="float32", device="cuda:1") as trainer:
        for batch in random_batches(2):
            assert trainer.step(batch).skipped is None
        assert torch.cuda.memory_allocated(1) > 0
    assert torch.cuda.current_device() == before == 0
    assert torch.cuda.max_memory_allocated(0) == used
