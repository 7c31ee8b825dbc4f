"""Parameters after training are bitwise those of plain PyTorch."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from plain import PlainTrainer
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, LearningRate, Trainer

REQUIRED = [
    "gpt2",
    "opt",
    "gpt_neox",
    "llama",
    "llama_tied",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "mixtral",
    "deepseek_v3",
]
MORE = ["gpt2_dropout", "opt_projected", "bloom", "gemma4_shared"]


@dataclass(frozen=True)
class Case:
    schedule: str = "vertical"
    delayed_share: float = 0.0
    layers_per_unit: int = 1
    max_grad_norm: float | None = 0.2
    on_ssd: float | None = None
    on_device: float | None = None
    gradients: str | None = None
    snake: bool = True
    device: str = "cpu"
    kept: float = 0.0
    group: int | None = None

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


SHARES = [(0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.4, 0.3)]  # of boundaries on SSD and on the device
CASES = [
    *(
        Case(schedule, share, layers)
        for schedule in ("vertical", "horizontal")
        for share in (0.0, 0.3, 1.0)
        for layers in (1, 2)
    ),
    Case(delayed_share=0.3, layers_per_unit=3, max_grad_norm=None),
    Case(delayed_share=0.3, on_ssd=1.0, gradients="ssd"),
    Case("horizontal", 0.3, 2, None, 0.5, gradients="ssd"),
    Case(snake=False, delayed_share=1.0, gradients="ssd"),
    *(Case(delayed_share=0.3, layers_per_unit=layers, on_ssd=0.5, kept=kept) for layers in (1, 3) for kept in (0.3, 1)),
    Case("horizontal", 0.3, 2, on_ssd=0.5, kept=0.6),
    *(Case(delayed_share=0.3, on_ssd=0.4, on_device=0.3, device="emulated", kept=kept) for kept in (0.3, 1)),
    *(Case(delayed_share=0.3, on_ssd=s, on_device=d, device="emulated") for s, d in SHARES),
    *(Case("horizontal", 0.3, 2, None, s, d, gradients="ssd", device="emulated") for s, d in SHARES),
    *(Case(delayed_share=share, group=group) for share in (0.0, 0.3, 1.0) for group in (2, 3)),
    Case(delayed_share=0.3, max_grad_norm=None, on_ssd=0.5, gradients="ssd", kept=0.6, group=2),
    Case(delayed_share=1.0, layers_per_unit=2, on_ssd=0.5, kept=1, group=3),
    *(Case(delayed_share=0.3, on_ssd=0.4, on_device=0.3, device="emulated", kept=0.4, group=g) for g in (2, 3)),
]


def train_both(name: str, case: Case, folder: Path, steps: int = 5) -> None:
    settings = AdamW(lr=2e-3, weight_decay=0.1, max_grad_norm=case.max_grad_norm)
    rate = LearningRate(peak=2e-3, shape="cosine", steps=steps, warmup_steps=2)
    trainer = Trainer(
        small_config(name),
        folder / "store",
        optimizer=settings,
        learning_rate=rate,
        dtype="float32",
        delayed_share=case.delayed_share,
        schedule=case.schedule,
        layers_per_unit=case.layers_per_unit,
        snake=case.snake,
        group_size=case.group,
        boundaries_on_ssd=case.on_ssd,
        boundaries_on_device=case.on_device,
        gradients=case.gradients,
        kept_activations=case.kept,
        device=case.device,
        chunk_elements=8192,
        seed=3,
    )
    trainer.save_pretrained(folder / "before")
    plain = PlainTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "before", dtype=torch.float32), settings, seed=3, lr=rate.at
    )
    any_clipped = False
    for batch in random_batches(steps):
        result = trainer.step(batch)
        loss = plain.step_as(trainer, batch)
        assert result.skipped is None
        any_clipped |= result.clipped
        assert result.loss == pytest.approx(loss, rel=1e-6)
    if case.max_grad_norm is not None:
        assert any_clipped
    trainer.save_pretrained(folder / "after")
    trainer.close()
    ours = AutoModelForCausalLM.from_pretrained(folder / "after", dtype=torch.float32).state_dict()
    theirs = plain.model.state_dict()
    assert ours.keys() == theirs.keys()
    different = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    assert not different
    before = AutoModelForCausalLM.from_pretrained(folder / "before", dtype=torch.float32).state_dict()
    assert any(not torch.equal(before[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_every_way_of_running_a_step_is_bitwise_plain_pytorch(name, case, tmp_path):
    train_both(name, case, tmp_path)


@pytest.mark.parametrize("name", REQUIRED + MORE)
@pytest.mark.parametrize(
    "case",
    [
        Case(delayed_share=0.3),
        Case(delayed_share=0.3, layers_per_unit=2, kept=1),
        Case("horizontal", 0.3, 2, on_ssd=0.0, kept=0.5),
        Case(delayed_share=0.3, kept=0.5, group=2),
    ],
    ids=str,
)
def test_every_architecture_is_bitwise_plain_pytorch(name, case, tmp_path):
    train_both(name, case, tmp_path)
