"""A run's losses are those of a plain transformers and PyTorch script on the same data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chat_run import write_chat_config

from greedysnake.report.metrics import read_metrics

SCRIPT = Path(__file__).parent.parent / "examples" / "plain_finetune.py"


@pytest.mark.parametrize(
    "overrides",
    [["data.packing=documents"], ["data.packing=none", "training.micro_batches=4", "optimizer.lr_schedule=linear"]],
    ids=["packed", "padded"],
)
def test_losses_of_twenty_steps(tmp_path, overrides):
    config = write_chat_config(tmp_path, training={"steps": 20, "eval_every": None})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for command in (
        ["-m", "greedysnake", "train", config, *overrides],
        [SCRIPT, config, tmp_path / "plain.jsonl", *overrides],
    ):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    ours, plain = read_metrics(tmp_path / "run" / "metrics.jsonl"), read_metrics(tmp_path / "plain.jsonl")
    assert len(ours) == len(plain) == 20
    for mine, other in zip(ours, plain, strict=True):
        assert mine["target_tokens"] == other["target_tokens"]
        assert mine["lr"] == pytest.approx(other["lr"], rel=1e-12)
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert ours[-1]["loss"] < 0.8 * ours[0]["loss"]
