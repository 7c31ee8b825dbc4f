"""TensorBoard and Weights & Biases: the curves of metrics.jsonl, over a kill and a resume; what fails stops no run."""

import json
import signal
import sys
from pathlib import Path

import pytest
from commands import Command
from small_run import write_config
from test_cli import command  # noqa: F401

from greedysnake.report.loggers import CURVES, Loggers
from greedysnake.report.metrics import read_metrics


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_one_curve_over_a_kill_and_a_resume(tmp_path, command):  # noqa: F811
    pytest.importorskip("tensorboard")
    path = write_config(tmp_path, optimizer={"lr_schedule": "constant"}, logging={"tensorboard": True})
    run = tmp_path / "run"
    keeping = ["engine.resident_state=0.5", "training.snapshot_every=4"]  # so some steps must be made again
    process = Command(["train", path, "training.steps=1000000", *keeping], tmp_path / "log")
    process.wait_for_steps(run, 7)
    process.process.kill()
    assert process.ending()[0] == -signal.SIGKILL
    steps = len(read_metrics(run / "metrics.jsonl")) + 3
    status, _, errors = command("resume", run, f"training.steps={steps}")
    assert status == 0, errors
    lines, found = read_metrics(run / "metrics.jsonl"), curves_in(run / "tensorboard")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for key, curve in CURVES.items():
        expected = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if key.startswith("eval"):
            assert found[curve][0][0] == 0  # before training
            assert found[curve][1:] == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
        elif expected:
            assert found[curve] == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    assert "train/loss_scale" not in found  # bfloat16 has none


def test_wandb_offline_keeps_both_parts_of_a_run_under_one_id(tmp_path, command):  # noqa: F811
    pytest.importorskip("wandb")
    path = write_config(tmp_path, logging={"wandb": {"project": "snakes", "mode": "offline"}})
    run = tmp_path / "run"
    status, output, errors = command("train", path)
    assert status == 0, errors
    status, more, errors = command("resume", run, "training.steps=6")
    assert status == 0, errors
    assert "gets no more metrics" not in output + more
    identity = json.loads((run / "wandb.json").read_text())["id"]
    parts = sorted(run.glob(f"wandb/offline-run-*/run-{identity}.wandb"))
    assert parts
    content = b"".join(part.read_bytes() for part in parts)
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl")]
    assert len(losses) == 6
    for loss in losses:
        assert json.dumps(loss).encode() in content
    assert b"train/loss" in content
    assert b"snakes" in content


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_missing_package_is_said_before_anything_else(tmp_path, command, monkeypatch, verb):  # noqa: F811
    path = write_config(tmp_path)
    if verb == "resume":
        assert command("train", path)[0] == 0
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    wanted = ["logging.tensorboard=true", "logging.wandb={project: p}", "training.steps=6"]
    status, _, errors = command(verb, path if verb == "train" else tmp_path / "run", *wanted)
    assert status == 1
    for name in ("tensorboard", "wandb"):
        assert f"logging.{name}: the package {name} is not installed" in " ".join(errors.split())
        assert f"pip install 'greedysnake[{name}]'" in " ".join(errors.split())
    assert "Traceback" not in errors
    assert (tmp_path / "run").exists() == (verb == "resume")


def test_a_service_that_fails_is_told_once_and_left_out():
    class Failing:
        name = "Faulty"

        def write(self, step, curves):
            raise OSError("no route")

        def close(self):
            raise AssertionError("left out before")

    class Working:
        name = "Working"

        def __init__(self):
            self.written = []

        def write(self, step, curves):
            self.written.append((step, curves))

        def close(self):
            self.written.append("closed")

    said, working = [], Working()
    loggers = Loggers([Failing(), working], said.append)
    loggers.write({"step": 1, "loss": 2.5, "lr": 1, "grad_norm": float("nan"), "loss_scale": None, "skipped": None})
    loggers.write({"step": 2, "loss": 2.25})
    loggers.close()
    assert working.written == [(1, {"train/loss": 2.5, "train/lr": 1.0}), (2, {"train/loss": 2.25}), "closed"]
    assert len(said) == 1
    assert "Faulty gets no more metrics" in said[0]
    assert "no route" in said[0]
