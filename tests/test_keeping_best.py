"""Early stopping and the best weights: what they do, and that a run killed at any moment ends as an untouched one."""

import json
import math
import os
import signal
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from commands import Command
from safetensors.torch import load_file
from small_run import write_config
from test_cli import command  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

from greedysnake.cli import best
from greedysnake.cli.best import find_kept
from greedysnake.report.evaluations import best_evaluation, early_stop_reason, perplexity
from greedysnake.report.metrics import read_metrics
from greedysnake.units import format_bytes

nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "stops"),
    [
        ([3, 2, 1, 0.5], 1, 0, False),
        ([3, 2, 2], 1, 0, True),
        ([3, 2, 2], 2, 0, False),
        ([3, 2, 2.5, 2.4, 1.9], 3, 0, False),
        ([3, 2, 2.5, 2.4, 2.3], 3, 0, True),
        ([3, 2, 1.95, 1.9, 1.86], 3, 0.2, True),  # each a little lower, none by enough
        ([3, 2, 1.95, 1.7, 1.6], 3, 0.2, False),  # lower than the last improvement by enough, together
        ([nan, nan], 2, 0, True),
        ([nan, 1], 2, 0, False),
        ([1, nan, inf], 2, 0, True),
        ([], 1, 0, False),
        ([5, 6, 7], None, 0, False),
    ],
)
def test_when_a_run_stops(losses, patience, min_delta, stops):
    evaluations = [(0, 0.1), *((10 * number, float(loss)) for number, loss in enumerate(losses, 1))]
    reason = early_stop_reason(evaluations, patience, min_delta)
    assert (reason is not None) == stops
    if stops:
        assert reason.startswith("early stopping: ")


def test_the_best_evaluation_is_the_first_of_the_lowest_after_a_step():
    assert best_evaluation([(0, 0.5), (10, 2.0), (20, 1.0), (30, nan), (40, 1.0)]) == (20, 1.0)
    assert best_evaluation([(0, 0.5), (10, nan)]) is None
    assert perplexity(0.0) == 1
    assert perplexity(1e6) == inf
    assert math.isnan(perplexity(nan))


def numbers_of(run: Path) -> list[dict]:
    """Metrics without what depends on the clock and the machine."""
    timed = {"seconds", "tokens_per_second", "busy", "host_peak_bytes", "ssd_read_bytes", "ssd_write_bytes"}
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(run / "metrics.jsonl")]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = weights_of(one), weights_of(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_early_stop_counts_over_a_resume_ends_well_and_can_be_lifted(tmp_path, command):  # noqa: F811
    path = write_config(tmp_path, training={"eval_every": 1, "early_stop": 2}, optimizer={"lr": 1e-30})
    status, _, errors = command("train", path, "training.steps=2")
    assert status == 0, errors  # one evaluation without improvement, at the last step
    status, output, errors = command("resume", tmp_path / "run", "training.steps=9")
    assert status == 0, errors
    assert "Stopped after step 3, early stopping: 2 evaluations in a row without a loss better than" in output
    assert "Stopped early: 3 steps" in output
    assert "greedysnake resume" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["planned_steps"] == 9
    assert summary["stopped_by"].startswith("early stopping: 2 evaluations")
    assert summary["best_eval_step"] == 1
    assert summary["best_eval_perplexity"] == pytest.approx(math.exp(summary["best_eval_loss"]))
    assert command("report", tmp_path / "run")[0] == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Ended after 3 of 9 steps by early stopping: 2 evaluations in a row" in page
    assert f'<b class="known">{summary["best_eval_perplexity"]:.3g}</b><span>after step 1</span>' in page
    status, _, errors = command("resume", tmp_path / "run")
    assert status == 1
    assert "training.early_stop=4" in errors
    status, output, errors = command("resume", tmp_path / "run", "training.early_stop=null")
    assert status == 0, errors
    assert "Done: 9 steps" in output


@pytest.fixture
def worsening(tmp_path) -> Path:
    """Settings of a run that gets better for four evaluations, and then is wrecked by its learning rate."""
    return write_config(
        tmp_path,
        training={"steps": 4, "eval_every": 1, "keep_best": True},
        optimizer={"lr_schedule": "constant", "max_grad_norm": None},
    )


def test_the_best_weights_are_those_of_their_step_and_can_be_exported(tmp_path, worsening, command):  # noqa: F811
    run = tmp_path / "run"
    status, output, errors = command("train", worsening)
    assert status == 0, errors
    assert "Best weights: " in output
    assert command("export", run, tmp_path / "at_4")[0] == 0
    status, output, errors = command("resume", run, "training.steps=7", "optimizer.lr=10")
    assert status == 0, errors
    losses = {line["step"]: line["eval_loss"] for line in read_metrics(run / "metrics.jsonl")}
    assert min(losses, key=lambda step: losses[step]) == 4
    assert "with --best: as of step 4" in output
    status, output, errors = command("export", run, tmp_path / "best", "--best", "--json")
    assert status == 0, errors
    assert json.loads(output) == {
        "folder": str(tmp_path / "best"),
        "adapter": False,
        "steps_done": 4,
        "eval_loss": losses[4],
    }
    assert command("export", run, tmp_path / "last")[0] == 0
    assert same_weights(tmp_path / "best", tmp_path / "at_4")
    assert not same_weights(tmp_path / "best", tmp_path / "last")
    assert {path.name for path in (tmp_path / "best").iterdir()} == {
        path.name for path in (tmp_path / "last").iterdir()
    }
    AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    AutoTokenizer.from_pretrained(tmp_path / "best")
    assert [path.name for path in (run / "best").iterdir()] == ["step-4"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_model"]["step"] == 4
    assert command("export", run, tmp_path / "best", "--best")[0] == 1  # there is something already
    status, output, errors = command("export", run, tmp_path / "best", "--best", "--overwrite")
    assert status == 0, errors
    assert "Wrote the model after step 4" in output
    assert same_weights(tmp_path / "best", tmp_path / "at_4")
    status, _, errors = command("export", run, tmp_path / "best", "--best", "--dtype", "float32", "--merge")
    assert status == 1
    assert "--dtype and --merge: not possible with --best" in errors
    for kind in ([], ["--best"]):  # neither may take the place of what is kept
        status, _, errors = command("export", run, run / "best" / "step-4", "--overwrite", *kind)
        assert status == 1
        assert "is a place of the run itself" in errors
    assert find_kept(run).step == 4


def test_the_best_adapters_are_kept_and_exported_alone(tmp_path, command):  # noqa: F811
    pytest.importorskip("peft")
    path = write_config(tmp_path, training={"steps": 2, "eval_every": 1, "keep_best": True}, lora={"r": 2, "alpha": 4})
    status, output, errors = command("train", path)
    assert status == 0, errors
    kept = find_kept(tmp_path / "run").folder
    assert {path.name for path in kept.glob("adapter*")} == {"adapter_config.json", "adapter_model.safetensors"}
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights_of(kept).values())
    assert f"Best weights: {format_bytes(size)} more" in output
    status, output, errors = command("export", tmp_path / "run", tmp_path / "best", "--best")
    assert status == 0, errors
    assert "Wrote the adapters after step" in output
    assert same_weights(tmp_path / "best", kept)


def test_without_best_weights_the_export_says_so(tmp_path, command):  # noqa: F811
    assert command("train", write_config(tmp_path))[0] == 0
    status, _, errors = command("export", tmp_path / "run", tmp_path / "out", "--best")
    assert status == 1
    assert "has kept no best weights" in errors
    assert not (tmp_path / "out").exists()


def test_too_little_disk_for_the_best_weights_is_said_before_the_first_step(
    tmp_path,
    worsening,
    command,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(best, "free_bytes", lambda *_: 1000)
    status, _, errors = command("train", worsening)
    assert status == 1
    assert "training.keep_best" in errors
    assert "is free (1,000 bytes)" in " ".join(errors.split())
    assert not (tmp_path / "run").exists()


def killed_at(name: str, call: int) -> None:
    """Have this process killed in a call of a function that keeping the best weights makes."""
    original, calls = getattr(best, name), count(1)

    def counted(*args, **options):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(best, name, counted)


# Calls while the weights of step 3 are kept: before anything is written, with a part written, complete without its
# name, named before the disk knows, and with the former ones still there; and after the last step.
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("_remove_remains", 5),
        ("load_tokenizer", 3),
        ("write_json_atomic", 3),
        ("make_last", 3),
        ("flush_folder", 5),
        ("_remove_remains", 6),
        ("make_last", 4),
    ],
)
def test_killed_while_the_best_weights_are_replaced(tmp_path, worsening, command, name, call):  # noqa: F811
    run, whole = tmp_path / "run", tmp_path / "whole"
    status, _ = Command(["train", worsening], tmp_path / "log", partial(killed_at, name, call)).ending()
    assert status == -signal.SIGKILL
    kept = find_kept(run)
    done = len(read_metrics(run / "metrics.jsonl"))
    assert kept.step in (done - 1, done)
    status, _, errors = command("export", run, tmp_path / "out", "--best")
    assert status == 0, errors
    assert command("train", worsening, f"run={tmp_path / 'short'}", f"training.steps={kept.step}")[0] == 0
    assert command("export", tmp_path / "short", tmp_path / "expected")[0] == 0
    assert same_weights(tmp_path / "out", tmp_path / "expected")

    status, output, errors = command("resume", run)
    assert status == 0, output + errors
    assert "Done: 4 steps" in output
    assert command("train", worsening, f"run={whole}")[0] == 0
    assert numbers_of(run) == numbers_of(whole)
    for path in (run, whole):
        assert [kept.name for kept in (path / "best").iterdir()] == ["step-4"]
    assert same_weights(run / "best" / "step-4", whole / "best" / "step-4")
