"""Runs that are interrupted or refused before their first step, or broken off in one: what they say and leave."""

import json
from pathlib import Path

import pytest
from small_run import write_config
from test_cli import command  # noqa: F401

from greedysnake import Trainer
from greedysnake.cli import training
from greedysnake.engine import loading, opening


def interrupt(*arguments, **options) -> None:
    raise KeyboardInterrupt


def outside(folder: Path) -> tuple[Path, Path]:
    """The config of a run whose storage is not in its folder, and that storage."""
    return write_config(folder, engine={"storage": [str(folder / "ssd")]}), folder / "ssd"


def test_a_run_that_is_refused_once_its_model_is_loaded_leaves_no_store(tmp_path, command):  # noqa: F811
    path, storage = outside(tmp_path)
    samples = ["training.sample_every=1", "training.sample_prompts=[the]", "training.steps=1"]
    # as many positions as need more memory than may be used
    many = ["model.config.max_position_embeddings=10000000", "training.sample_tokens=9000000"]
    status, _, errors = command("train", path, *samples, *many, "engine.host_memory=3GiB")
    assert status == 1
    assert "training.sample_tokens" in errors
    assert not (tmp_path / "run").exists()
    assert not storage.exists()
    status, _, errors = command("train", path, "training.steps=1")
    assert status == 0, errors


def test_an_interrupt_once_the_model_is_loaded_leaves_no_store(tmp_path, command, monkeypatch):  # noqa: F811
    path, storage = outside(tmp_path)
    monkeypatch.setattr(training, "write_plan", interrupt)
    status, output, _ = command("train", path)
    assert status == 130
    assert "Interrupted before training began; nothing was kept." in output
    assert not (tmp_path / "run").exists()
    assert not storage.exists()


def test_a_store_of_another_run_stays(tmp_path, command):  # noqa: F811
    path, storage = outside(tmp_path)
    assert command("train", path, "training.steps=1")[0] == 0
    before = {file: file.read_bytes() for file in storage.rglob("*") if file.is_file()}
    status, _, errors = command("train", path, f"run={tmp_path / 'other'}")
    assert status == 1
    assert "already holds the store of another run" in errors
    assert {file: file.read_bytes() for file in storage.rglob("*") if file.is_file()} == before


def test_an_interrupt_while_the_model_is_loaded_is_told_and_resumed(tmp_path, command, monkeypatch):  # noqa: F811
    path, _ = outside(tmp_path)
    commit = loading.commit_so_far
    with monkeypatch.context() as patch:
        patch.setattr(loading, "COMMIT_BYTES", 1)
        patch.setattr(opening, "commit_so_far", lambda *arguments: (commit(*arguments), interrupt()))
        status, output, _ = command("train", path)
    run = tmp_path / "run"
    assert status == 130
    assert f"Interrupted while the model was being loaded. greedysnake resume {run} goes on with that." in output
    with monkeypatch.context() as patch:
        patch.setattr(training, "prepare_inputs", interrupt)
        assert command("resume", run)[0] == 130
    with monkeypatch.context() as patch:
        patch.setattr(training, "write_plan", interrupt)
        status, output, _ = command("resume", run)
    assert status == 130
    assert f"greedysnake resume {run} begins it" in output
    status, output, errors = command("resume", run)
    assert status == 0, errors
    assert "Done: 4 steps" in output


@pytest.mark.parametrize("arguments", [["train"], ["train", "--json"], ["demo", "--steps", "1"]])
def test_a_run_that_is_broken_off_ends_with_130(arguments, tmp_path, command, monkeypatch):  # noqa: F811
    """Also before the first update, and with JSON on standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "step", interrupt)
    status, output, errors = command(*arguments, *([write_config(tmp_path)] if "train" in arguments else []))
    assert status == 130
    assert "Broken off. Saved" in (errors if "--json" in arguments else output)
    if "--json" in arguments:
        assert json.loads(output)["stopped_by"] == training.BROKEN_OFF
