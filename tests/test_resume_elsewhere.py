"""A run that was begun with relative paths goes on from another directory, and finds data that has moved."""

import shutil
from pathlib import Path

import pytest
import yaml
from small_run import run_well, write_config
from test_cli import command  # noqa: F401

from greedysnake.plan.hardware import load_hardware, save_hardware
from greedysnake.report.metrics import read_metrics


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run of two steps, begun in a folder of its own with nothing but relative paths; the test is elsewhere."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(home)
    write_config(Path(), run="base", training={"steps": 1, "eval_every": None})
    Path("base.yaml").write_text(Path("config.yaml").read_text())
    run_well("train", "base.yaml")
    run_well("export", "base", "base-model")
    shutil.copy("text.jsonl", "held-out.jsonl")
    with Path("held-out.jsonl").open("a") as file:
        file.write('{"text": "' + "something else to read. " * 40 + '"}\n')
    save_hardware(load_hardware("laptop-cpu-24gb"), Path("hardware.json"))
    write_config(
        Path(),
        run="run",
        model={"path": "base-model", "config": None},
        data={"train": ["text.jsonl"], "evaluation": "held-out.jsonl", "eval_share": 0.0, "cache": "tokens"},
        training={"steps": 2},
        engine={"storage": ["disk"], "hardware": "hardware.json", "host_memory": "4GiB"},
    )
    run_well("train", "config.yaml")
    monkeypatch.chdir(elsewhere)
    return Path("../home/run")


def test_it_goes_on_and_data_may_move(run, command):  # noqa: F811
    kept = yaml.safe_load((run / "config.yaml").read_text())
    home = run.parent.resolve()
    assert kept["data"]["train"] == [str(home / "text.jsonl")]
    assert kept["data"]["evaluation"] == str(home / "held-out.jsonl")
    assert kept["data"]["cache"] == str(home / "tokens")
    assert kept["model"]["path"] == kept["model"]["tokenizer"] == str(home / "base-model")
    assert kept["engine"]["hardware"] == str(home / "hardware.json")
    assert kept["engine"]["storage"] == [str(home / "disk")]
    status, _, errors = command("resume", run, "training.steps=3")
    assert status == 0, errors

    (home / "text.jsonl").rename("moved.jsonl")
    shutil.move(home / "base-model", "base-model")  # not needed any more
    status, _, errors = command("resume", run, "training.steps=4")
    assert status == 1
    assert f"data.train: {home / 'text.jsonl'} is not there, with which the run began" in errors
    assert f"greedysnake resume {run} data.train=PLACE" in errors
    status, _, errors = command("resume", run, "training.steps=4", "data.train=moved.jsonl")
    assert status == 0, errors
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["train"] == str(Path("moved.jsonl").absolute())

    Path("other.jsonl").write_text('{"text": "' + "not the same. " * 400 + '"}\n')
    status, _, errors = command("resume", run, "training.steps=5", "data.train=other.jsonl")
    assert status == 1
    assert "the training text is not what it was when the run began" in errors
    status, _, errors = command("resume", run, "training.steps=5", "model.path=base-model")
    assert status == 1
    assert f"model.path: '{Path('base-model').absolute()}' cannot be set for a run that began with '{home}" in errors
