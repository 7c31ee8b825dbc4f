"""A run that goes on from a snapshot is bitwise the run that was never interrupted."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from architectures import random_batches, small_config
from committed import weights_in
from small_run import write_config
from test_cli import command  # noqa: F401

from greedysnake import AdamW, LearningRate, Trainer
from greedysnake.errors import ConfigError, StorageError
from greedysnake.report.metrics import read_metrics

BATCHES = random_batches(6, 3)
RATE = LearningRate(peak=1e-2, shape="cosine", steps=6, warmup_steps=2)


def trainer_for(folder: Path, name: str = "llama", **settings) -> Trainer:
    settings = {"optimizer": AdamW(lr=1e-2), "learning_rate": RATE, "chunk_elements": 4096, **settings}
    return Trainer(small_config(name), folder, **settings)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2_dropout", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_run_resumed_under_other_settings_at_each_step_is_bitwise_the_same(tmp_path, name, dtype):
    with trainer_for(tmp_path / "whole", name, dtype=dtype, seed=5) as trainer:
        losses = [trainer.step(batch).loss for batch in BATCHES]
    changes = [
        {},
        {"delayed_share": 0.0, "resident_state": 0.5},
        {"delayed_share": 0.5, "gradients": "ssd", "boundaries_on_ssd": 0.5},
        {"resident_weights": None, "resident_state": None, "snapshot_every": 2},
        {"device": "emulated", "delayed_share": 1.0},
    ]
    trainer = trainer_for(tmp_path / "parts", name, dtype=dtype, seed=5, notes={"mine": [1, "two"]})
    found = [trainer.step(BATCHES[0]).loss]
    trainer.close()
    for step, change in enumerate(changes, 1):
        with Trainer.resume(tmp_path / "parts", **change) as trainer:
            assert trainer.steps_done == step
            assert trainer.notes == {"mine": [1, "two"]}
            found.append(trainer.step(BATCHES[step]).loss)
    assert list(map(repr, found)) == list(map(repr, losses))  # a step that is skipped has no loss: nan
    ours, theirs = weights_in(tmp_path / "parts"), weights_in(tmp_path / "whole")
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def test_frozen_parameters_stay_frozen(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(small_config("llama"))
    frozen = "model.layers.0.mlp.up_proj.weight"
    model.get_parameter(frozen).requires_grad_(False)
    before = model.get_parameter(frozen).detach().clone()
    with Trainer(model, tmp_path / "store", dtype="float32", optimizer=AdamW(lr=1e-2)) as trainer:
        trainer.step(BATCHES[0])
    with Trainer.resume(tmp_path / "store") as trainer:
        trainer.step(BATCHES[1])
    found = weights_in(tmp_path / "store")
    assert torch.equal(found[frozen], before)


def test_what_cannot_change_is_refused_with_the_value_that_it_has(tmp_path):
    with trainer_for(tmp_path / "store") as trainer:
        trainer.step(BATCHES[0])
    with pytest.raises(ConfigError) as caught:
        Trainer.resume(tmp_path / "store", dtype="float32", seed=1, speed="high", delayed_share=0.5)
    message = str(caught.value)
    assert "dtype was 'bfloat16' when the run began, so it cannot be 'float32' now" in message
    assert "seed was 0" in message
    assert "speed is not a setting of a trainer" in message
    assert "delayed_share" not in message
    with pytest.raises(ConfigError, match="delayed_share: must lie between 0 and 1"):
        Trainer.resume(tmp_path / "store", delayed_share=2)
    Trainer.resume(tmp_path / "store").close()  # a refusal leaves the store free


def test_a_run_on_a_device_that_is_not_here_goes_on_on_another(tmp_path):
    with trainer_for(tmp_path / "store") as trainer:
        trainer.step(BATCHES[0])
        trainer.settings = replace(trainer.settings, device="cuda:99")  # as if it had been there
    with pytest.raises(ConfigError, match="device: 'cuda:99' was asked for, but"):
        Trainer.resume(tmp_path / "store")
    with Trainer.resume(tmp_path / "store", device="cpu") as trainer:
        trainer.step(BATCHES[1])


def test_two_runs_never_share_a_store(tmp_path):
    with trainer_for(tmp_path / "store"), pytest.raises(StorageError, match="in use by process"):
        Trainer.resume(tmp_path / "store")


def test_skipped_steps_are_counted_on(tmp_path, monkeypatch):
    from greedysnake.errors import NonFiniteError
    from greedysnake.models.streaming import StreamedModel

    original = StreamedModel.head
    monkeypatch.setattr(StreamedModel, "head", lambda self, m: original(self, m) * float("nan"))
    with trainer_for(tmp_path / "store", max_skipped_steps=3) as trainer:
        trainer.step(BATCHES[0])
        trainer.step(BATCHES[1])
    trainer = Trainer.resume(tmp_path / "store")
    assert trainer.steps_done == 2
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        trainer.step(BATCHES[2])
    trainer.close()


def losses_of(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run / "metrics.jsonl")]


def test_a_killed_run_goes_on_from_the_command_line(tmp_path, command):  # noqa: F811
    path = write_config(tmp_path, training={"eval_every": 3}, optimizer={"lr_schedule": "constant"})
    keeping = ["engine.resident_state=0.5", "training.snapshot_every=4"]  # so some steps must be made again
    process = subprocess.Popen(
        [sys.executable, "-m", "greedysnake", "train", path, "training.steps=1000000", *keeping],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= 7):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = len(read_metrics(metrics)) + 3
    status, output, errors = command("resume", tmp_path / "run", f"training.steps={steps}", "--json")
    assert status == 0, errors
    assert json.loads(output)["steps"] == steps
    assert json.loads(output)["first_eval_loss"] is not None
    assert command("train", path, f"run={tmp_path / 'whole'}", f"training.steps={steps}")[0] == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    ours, theirs = weights_in(tmp_path / "run" / "store"), weights_in(tmp_path / "whole" / "store")
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["training"]["steps"] == steps


def test_a_run_that_is_over_goes_on_when_it_is_given_more_steps(tmp_path, command):  # noqa: F811
    path = write_config(tmp_path, optimizer={"lr_schedule": "constant"})
    assert command("train", path)[0] == 0
    status, _, errors = command("resume", tmp_path / "run")
    assert status == 1
    assert "has made 4 steps" in errors
    assert "training.steps=8" in errors
    status, output, errors = command("resume", tmp_path / "run", "training.steps=6")
    assert status == 0, errors
    assert "Going on after step 4 of 6" in output
    assert "Done: 6 steps" in output
    assert command("train", path, "training.steps=6", f"run={tmp_path / 'whole'}")[0] == 0
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")
    assert command("export", tmp_path / "run", tmp_path / "out")[0] == 0


def test_what_a_run_depends_on_cannot_change(tmp_path, command):  # noqa: F811
    path = write_config(tmp_path)
    assert command("train", path)[0] == 0
    changes = ["seed=3", "training.micro_batches=1", "data.sequence_length=16", "model.dtype=float32", "run=elsewhere"]
    status, _, errors = command("resume", tmp_path / "run", "training.steps=8", *changes)
    assert status == 1
    for change in changes:
        assert change.partition("=")[0] in errors
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text().replace("fox", "cat"))
    status, _, errors = command("resume", tmp_path / "run", "training.steps=8")
    assert status == 1
    assert "the training text is not what it was" in errors


def test_a_folder_without_a_snapshot_says_what_to_do(tmp_path, command):  # noqa: F811
    status, _, errors = command("resume", tmp_path / "nowhere")
    assert status == 1
    assert "is not a run folder" in errors
    assert command("train", write_config(tmp_path))[0] == 0
    (tmp_path / "run" / "store" / "manifest.json").unlink()
    status, _, errors = command("resume", tmp_path / "run", "training.steps=8")
    assert status == 1
    assert "manifest.json is missing" in errors


def test_killed_at_random_and_at_commits_it_ends_the_same(tmp_path):
    """A small version of what scripts/kill_test.py does in full."""
    script = Path(__file__).parents[1] / "scripts" / "kill_test.py"
    assert importlib.util.find_spec("greedysnake")
    result = subprocess.run(
        [sys.executable, script, tmp_path / "runs", "--kills", "14", "--seed", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bitwise those of an untouched run" in result.stdout


def test_a_flipped_bit_is_found_and_named(tmp_path, command):  # noqa: F811
    assert command("train", write_config(tmp_path))[0] == 0
    run = tmp_path / "run"
    status, output, errors = command("verify", run)
    assert status == 0, errors
    assert "Undamaged" in output
    assert "after step 4" in output
    flipped = run / "store" / "slot0.bin"
    whole = flipped.read_bytes()
    position = len(whole) // 2
    flipped.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
    other = (run / "store" / "slot1.bin").read_bytes()
    (run / "store" / "slot1.bin").write_bytes(other[:position] + bytes([other[position] ^ 4]) + other[position + 1 :])
    status, output, _ = command("verify", run, "--json")
    assert status == 1
    (damage,) = json.loads(output)["damaged"]
    assert damage["chunk"].startswith("unit")
    assert damage["offset"] <= position < damage["offset"] + damage["length"]
    status, _, errors = command("resume", run, "training.steps=8")
    assert status == 1
    assert damage["chunk"] in errors
    assert damage["file"] in errors


def test_cleaning_deletes_the_storage_and_nothing_else(tmp_path, command, monkeypatch):  # noqa: F811
    assert command("train", write_config(tmp_path))[0] == 0
    run = tmp_path / "run"
    (run / "store" / "mine.txt").write_text("keep")
    status, output, errors = command("clean", run, "--yes")
    assert status == 0, errors
    assert [path.name for path in (run / "store").iterdir()] == ["mine.txt"]
    assert "mine.txt" in output
    assert (run / "metrics.jsonl").is_file()
    status, _, errors = command("clean", run, "--yes")
    assert status == 1
    assert command("clean", tmp_path / "nowhere", "--yes")[0] == 1


def test_without_the_second_slot_only_a_run_that_was_closed_goes_on(tmp_path):
    with trainer_for(tmp_path / "whole") as trainer:
        expected = [trainer.step(batch).loss for batch in BATCHES[:4]]
    with trainer_for(tmp_path / "store", second_slot=False) as trainer:
        found = [trainer.step(batch).loss for batch in BATCHES[:2]]
        assert trainer.disk_bytes < 0.6 * disk_of(tmp_path / "whole")
    with Trainer.resume(tmp_path / "store", delayed_share=0.0) as trainer:
        found += [trainer.step(batch).loss for batch in BATCHES[2:4]]
    assert found == expected
    trainer = Trainer.resume(tmp_path / "store")
    trainer.step(BATCHES[4])
    trainer.step(BATCHES[5])
    trainer._store.close()  # as a crash would leave it
    with pytest.raises(StorageError, match="one slot and was being written to"):
        Trainer.resume(tmp_path / "store")


def disk_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


def test_a_store_over_two_folders_moves_with_its_folders(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    with trainer_for(folders) as trainer:
        first = trainer.step(BATCHES[0]).loss
    moved = [tmp_path / "here" / "one", tmp_path / "there" / "two"]
    for before, after in zip(folders, moved, strict=True):
        after.parent.mkdir()
        before.rename(after)
    with pytest.raises(StorageError):
        Trainer.resume(moved[::-1])
    with Trainer.resume(moved) as trainer:
        second = trainer.step(BATCHES[1]).loss
    with trainer_for(tmp_path / "whole") as trainer:
        assert [trainer.step(batch).loss for batch in BATCHES[:2]] == [first, second]
