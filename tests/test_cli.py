"""The command line as a person uses it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from small_run import write_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from greedysnake.cli.app import main
from greedysnake.report.metrics import read_metrics


def run_main(*arguments: str | Path, monkeypatch, capsys) -> tuple[int, str, str]:
    """Exit status, output and errors of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["greedysnake", *map(str, arguments)])
    status = 0
    try:
        main()
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *arguments: run_main(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_train_then_export(tmp_path, command):
    status, output, errors = command("train", write_config(tmp_path), "training.steps=6", "--json")
    assert status == 0, errors
    summary = json.loads(output)
    run = tmp_path / "run"
    assert summary == json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["last_eval_loss"] < summary["first_eval_loss"]
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    wanted = "loss grad_norm lr tokens seconds tokens_per_second ssd_read_bytes ssd_write_bytes host_peak_bytes"
    for line in lines:
        assert set(wanted.split()) <= line.keys()
        assert line["loss_scale"] is None  # bfloat16 needs none
        assert set(line["busy"]) == {"compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu"}
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6]
    plan = json.loads((run / "plan.json").read_text())
    assert plan["reasons"]
    assert plan["host_memory"]["expected_bytes"] <= plan["host_memory"]["budget_bytes"]
    assert lines[-1]["ssd_read_bytes"] == plan["ssd"]["read_bytes_per_step"]
    assert lines[-1]["ssd_write_bytes"] == plan["ssd"]["write_bytes_per_step"]
    for picture in ("loss.png", "timeline.png"):
        assert Image.open(run / picture).size == (1600, 600)
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert (run / "config.yaml").is_file()

    status, output, errors = command("export", run, tmp_path / "out")
    assert status == 0, errors
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    ids = tokenizer("the quick", return_tensors="pt")["input_ids"]
    assert model(ids).logits.isfinite().all()
    assert command("export", run, tmp_path / "out")[0] == 1


def test_the_exported_model_can_be_trained_further_with_its_tokenizer(tmp_path, command):
    assert command("train", write_config(tmp_path))[0] == 0
    assert command("export", tmp_path / "run", tmp_path / "model")[0] == 0
    again = tmp_path / "again"
    again.mkdir()
    path = write_config(again)
    settings = yaml.safe_load(path.read_text())
    settings["model"] = {"path": str(tmp_path / "model")}
    path.write_text(yaml.safe_dump(settings))
    status, output, errors = command("train", path, "--json")
    assert status == 0, errors
    before = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert json.loads(output)["first_eval_loss"] == pytest.approx(before["last_eval_loss"], abs=0.05)


def test_a_run_that_cannot_start_says_everything_at_once_and_leaves_nothing(tmp_path, command):
    path = write_config(tmp_path)
    status, _, errors = command(
        "train",
        path,
        "model.config=null",
        f"model.path={tmp_path / 'nowhere'}",
        "model.tokenizer=bytes",
        f"data.train=[{tmp_path / 'lost.txt'}, {tmp_path / 'gone'}]",
    )
    assert status == 1
    for words in ("nowhere does not exist", "lost.txt does not exist", "gone does not exist"):
        assert words in " ".join(errors.split())
    assert not (tmp_path / "run").exists()


def test_model_data_and_memory_are_checked_before_anything_is_written(tmp_path, command):
    path = write_config(tmp_path)
    cases = [
        (["data.sequence_length=100"], "64"),
        (["model.config.vocab_size=200"], "200"),
        (["engine.host_memory=50MiB"], "may use 50 MiB"),
        (["training.stepz=3"], "training.steps"),
        (["training.steps=many", "optimizer.lr=-1"], "optimizer.lr"),
    ]
    for overrides, words in cases:
        status, _, errors = command("train", path, *overrides)
        assert status == 1
        assert words in errors
        assert "Traceback" not in errors
        assert not (tmp_path / "run").exists()
    (tmp_path / "text.jsonl").write_text("")
    status, _, errors = command("train", path)
    assert status == 1
    assert "text.jsonl" in errors
    assert not (tmp_path / "run").exists()


def test_too_little_disk_is_said_before_the_first_step(tmp_path, command, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    status, _, errors = command("train", write_config(tmp_path))
    assert status == 1
    assert "needs" in errors
    assert "10,000 bytes" in errors
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_exists_is_kept(tmp_path, command):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("precious")
    status, _, errors = command("train", write_config(tmp_path))
    assert status == 1
    assert "exists already" in errors
    assert (tmp_path / "run" / "mine").read_text() == "precious"


def test_a_run_folder_can_be_moved_and_exported_from_anywhere(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path, run="here")
    assert command("train", path)[0] == 0
    (tmp_path / "here").rename(tmp_path / "there")
    assert command("train", path, "training.steps=2")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    status, output, errors = command("export", "../there", "out", "--json")
    assert status == 0, errors
    assert json.loads(output)["steps_done"] == 4


def test_a_run_that_cannot_start_leaves_its_neighbours(tmp_path, monkeypatch):
    from greedysnake.cli.training import _make_folder, _remove

    created = _make_folder(tmp_path / "runs" / "bad")
    (tmp_path / "runs" / "other").mkdir()
    _remove(created)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
    _remove(_make_folder(tmp_path / "new" / "deep" / "run"))
    assert not (tmp_path / "new").exists()


def test_export_of_what_is_not_a_run_is_refused(tmp_path, command):
    status, _, errors = command("export", tmp_path, tmp_path / "out")
    assert status == 1
    assert "not a run folder" in errors


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    """A long run in a process of its own, once it has done its first step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "greedysnake", "train", write_config(folder), "training.steps=100000", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(read_metrics(metrics)) >= 2):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_in_flight(tmp_path, command, number):
    process = start(tmp_path)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
    assert summary["steps"] == len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    status, output, _ = command("export", tmp_path / "run", tmp_path / "out", "--json")
    assert status == 0
    assert json.loads(output) == {
        "folder": str(tmp_path / "out"),
        "adapter": False,
        "steps_done": summary["steps"],
    }


def test_a_killed_run_can_be_exported_as_of_its_last_step(tmp_path, command):
    process = start(tmp_path, "engine.delayed_share=1")
    status, _, errors = command("export", tmp_path / "run", tmp_path / "out")
    assert status == 1
    assert "in use by process" in errors
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    status, output, _ = command("export", tmp_path / "run", tmp_path / "out")
    assert status == 0
    assert "Wrote the model after step" in output
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_demo_trains_samples_and_names_its_pictures(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, output, errors = command("demo", "--steps", "3")
    assert status == 0, errors
    folder = tmp_path / "greedysnake-demo"
    for name in ("loss.png", "timeline.png", "trace.json", "metrics.jsonl", "model"):
        assert (folder / name).exists()
        assert name in output
    before, after = (float(word) for word in output.split("held-out text: ")[1].split(" after")[0].split(" before, "))
    assert after < before
    assert "import " in output


def test_help_and_version_are_quick_and_say_what_there_is(command):
    status, output, _ = command("--help")
    assert status == 0
    for verb in ("train", "export", "demo"):
        assert verb in output
    assert command("--version")[1].startswith("greedysnake 0.")
