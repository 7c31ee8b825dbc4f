"""Random ways of running a step, on a device with its own memory, slow random copies and poisoned buffers.

Every one must give bitwise the weights that plain operations on the host give.
"""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in

from greedysnake import AdamW, Trainer

STEPS = 3


def train(folder: Path, name: str, micro_batches: int, clipping: float | None, **settings) -> dict[str, torch.Tensor]:
    """Weights after three steps."""
    with Trainer(
        small_config(name, num_hidden_layers=2) if name == "llama_tied" else small_config(name, n_layer=2),
        folder / "store",
        optimizer=AdamW(lr=3e-3, max_grad_norm=clipping),
        dtype="float32",
        snake=False,  # the order of additions is then the same under every schedule
        **settings,
    ) as trainer:
        for batch in random_batches(STEPS, micro_batches):
            assert trainer.step(batch).skipped is None
    return weights_in(folder / "store")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Weights of the plain run on the host, by what they depend on."""

    @cache
    def weights(name: str, micro_batches: int, clipping: float | None) -> dict[str, torch.Tensor]:
        return train(tmp_path_factory.mktemp("host"), name, micro_batches, clipping, delayed_share=0.0)

    return weights


@pytest.mark.parametrize("seed", range(200))
def test_a_random_plan_on_an_unkind_device_is_exact(seed, tmp_path, expected):
    draw = random.Random(seed)
    name = draw.choice(["llama_tied", "gpt2_dropout"])
    micro_batches = draw.randint(1, 4)
    clipping = draw.choice([None, 0.2])
    device = draw.choice(["emulated", "emulated", "emulated", "cpu"])
    on_ssd = draw.choice([0.0, 1.0, draw.random()])
    schedule = draw.choice(["vertical", "vertical", "horizontal"])
    found = train(
        tmp_path,
        name,
        micro_batches,
        clipping,
        device=device,
        schedule=schedule,
        group_size=draw.choice([None, None, 1, 2, 3]) if schedule == "vertical" else None,
        delayed_share=draw.choice([0.0, 1.0, draw.random()]),
        layers_per_unit=draw.choice([1, 2]),
        boundaries_on_ssd=on_ssd,
        boundaries_on_device=(1 - on_ssd) * draw.random() if device == "emulated" else 0.0,
        snapshot_every=draw.choice([None, None, 1, 2]),
        gradients=draw.choice(["host", "ssd"]),
        resident_weights=draw.choice([0.0, 0.0, 0.5, 1.0]),
        resident_state=draw.choice([0.0, 0.0, 0.4, None]),
        host_memory=draw.choice(["2GiB", "4GiB"]),
        chunk_elements=draw.choice([4096, 8192, 1 << 20]),
        kept_activations=draw.choice([0.0, 0.4, 1.0, None]),
    )
    wanted = expected(name, micro_batches, clipping)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
