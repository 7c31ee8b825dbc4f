"""The length of a run: steps, epochs or tokens, and what is wrong with them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import write_config
from test_cli import command  # noqa: F401
from test_config import SMALL, load, problems  # noqa: F401

from greedysnake.cli.length import epochs_at, planned_steps
from greedysnake.config import TrainingConfig, load_config
from greedysnake.data import TokenBatches, byte_tokenizer, load_data
from greedysnake.errors import ConfigError
from greedysnake.report.metrics import read_metrics
from greedysnake.units import parse_count


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> TokenBatches:
    """40 sequences of 16 bytes, 15 of them to learn."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("0123456789abcdef" * 40)
    return load_data(
        train=folder / "text.txt",
        tokenizer=byte_tokenizer(),
        sequence_length=16,
        micro_batch_size=3,
        micro_batches=2,
        seed=0,
        cache_dir=folder / "cache",
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(SMALL)
    return load_config(path)


def with_length(config, **length):
    return config.model_copy(update={"training": TrainingConfig(**length)})


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 1}, 7),  # 40 sequences, 6 a step
        ({"epochs": 3}, 20),
        ({"epochs": 0.15}, 1),  # 6 sequences
        ({"epochs": 0.16}, 1),
        ({"epochs": 0.18}, 2),
        ({"epochs": 1e-6}, 1),
        ({"tokens": 1}, 1),
        ({"tokens": 90}, 1),  # 6 x 15
        ({"tokens": 91}, 2),
        ({"tokens": 9 * 10**9}, 10**8),
    ],
)
def test_steps(config, batches, length, steps):
    assert batches.sequences == 40
    assert planned_steps(with_length(config, **length), batches) == steps


@given(epochs=st.floats(1e-3, 50), micro_batches=st.integers(1, 9), tokens=st.integers(1, 10**5))
def test_no_step_too_many_and_none_too_few(config, batches, epochs, micro_batches, tokens):
    batches = replace(batches, micro_batches=micro_batches)
    steps = planned_steps(with_length(config, epochs=epochs), batches)
    assert (steps - 1) * batches.sequences_per_step < max(1, round(epochs * 40)) <= steps * batches.sequences_per_step
    steps = planned_steps(with_length(config, tokens=tokens), batches)
    per_step = batches.sequences_per_step * 15
    assert (steps - 1) * per_step < tokens <= steps * per_step
    assert epochs_at(steps, batches) * 40 == pytest.approx(steps * batches.sequences_per_step)


def test_a_warm_up_that_is_longer_than_the_epochs(config, batches):
    config = with_length(config, epochs=1)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"warmup_steps": 7})})
    with pytest.raises(ConfigError, match=r"found 7; needs fewer than the 7 steps that training.epochs: 1 comes to"):
        planned_steps(config, batches)


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("training.steps=null", "training.steps", "missing; write steps: 1000 (or epochs: 3, or tokens: 20M)"),
        ("training.epochs=2", "training", "steps and epochs are given; keep one of them"),
        ("training.tokens=2B", "training", "steps and tokens are given; keep one of them"),
        ("training={epochs: 0}", "training.epochs", "found 0; needs a number, above 0"),
        ("training={epochs: .inf}", "training.epochs", "needs a number, above 0"),
        ("training={tokens: lots}", "training.tokens", "found 'lots'; needs a number of tokens above 0, such as 20M"),
        ("training={tokens: 0}", "training.tokens", "needs a number of tokens above 0"),
        ("training={tokens: true}", "training.tokens", "needs a number of tokens above 0"),
        ("training={tokens: 100000000T}", "training.tokens", "needs a number of tokens above 0"),
        ("training.early_stop=2", "training.early_stop", "nothing is evaluated on the way; set training.eval_every"),
        ("training.keep_best=true", "training.keep_best", "there is no evaluation data; set data.evaluation"),
        ("logging.wandb={name: x}", "logging.wandb", "needs a mapping with project (text)"),
        ("logging.wandb={project: x, mode: quiet}", "logging.wandb", "mode (online or offline)"),
        ("logging.wandb.projekt=x", "logging.wandb", "needs a mapping with project (text)"),
        ("logging.tensorboard=yes please", "logging.tensorboard", "needs true or false"),
    ],
)
def test_mistakes(problems, override, key, text):  # noqa: F811
    found = problems(SMALL, override)
    assert list(found) == [key]
    assert text in found[key]


def test_lengths_as_people_write_them(load):  # noqa: F811
    assert load(SMALL, "training={tokens: 20M}").training.tokens == 20_000_000
    assert load(SMALL, "training={tokens: 1.5B}").training.tokens == 1_500_000_000
    assert load(SMALL, "training={tokens: 3e9}").training.tokens == 3_000_000_000
    assert load(SMALL, "training.steps=null", "training.epochs=3").training.epochs == 3.0
    wandb = load(SMALL, "logging.wandb.project=snakes", "logging.wandb.mode=offline").logging.wandb
    assert (wandb.project, wandb.name, wandb.mode) == ("snakes", None, "offline")


@pytest.mark.parametrize("count", ["", "M", "-1", "0", "1.5", "1_5x", None, True, float("nan"), "9" * 50, "1e400", []])
def test_no_counts(count):
    with pytest.raises(ValueError, match="is not a count"):
        parse_count(count)


def test_a_run_of_epochs_and_one_of_tokens(tmp_path, command):  # noqa: F811
    path = write_config(tmp_path, training={"steps": None, "eval_every": None})
    text = tmp_path / "text.jsonl"
    text.write_text("".join(text.read_text().splitlines(keepends=True)[:1]))
    status, output, errors = command("train", path, "training.epochs=0.2")
    assert status == 0, errors
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert f"Length: {len(first)} steps of 4 sequences, {first[-1]['epoch']:.3g} epochs" in output
    assert plan["steps"] == len(first)
    assert first[-1]["epoch"] >= 0.2
    assert first[-2]["epoch"] < 0.2
    assert [line["lr"] for line in first][-1] == pytest.approx(1e-3)  # a tenth of the peak: the schedule ends here
    assert command("report", tmp_path / "run")[0] == 0
    assert f"Finished: {len(first)} of {len(first)} steps" in (tmp_path / "run" / "report.html").read_text()
    status, _, errors = command("resume", tmp_path / "run")
    assert status == 1
    assert f"training.epochs is 0.2, which comes to {len(first)}" in " ".join(errors.split())
    assert "training.epochs=0.4" in errors

    status, _, errors = command("train", path, f"run={tmp_path / 'tokens'}", "training.tokens=1K")
    assert status == 0, errors
    lines = read_metrics(tmp_path / "tokens" / "metrics.jsonl")
    assert {line["target_tokens"] for line in lines} == {4 * 31}
    assert {line["tokens"] for line in lines} == {4 * 32}
    assert lines[-1]["target_tokens_seen"] >= 1000 > lines[-2]["target_tokens_seen"]
    assert not Path(tmp_path / "tokens" / "best").exists()
    status, _, errors = command("resume", tmp_path / "tokens", f"training.steps={len(lines) + 1}")  # and no tokens
    assert status == 0, errors
    assert len(read_metrics(tmp_path / "tokens" / "metrics.jsonl")) == len(lines) + 1

    status, _, errors = command(
        "train", path, f"run={tmp_path / 'new'}", "training.epochs=0.2", "optimizer.warmup_steps=50"
    )
    assert status == 1
    assert "optimizer.warmup_steps: found 50" in errors
    assert not (tmp_path / "new").exists()
