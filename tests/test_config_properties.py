"""Any settings survive the way to YAML and back, and nonsense gives nothing but a `ConfigError`."""

import contextlib
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.config import RunConfig, dump_config, load_config
from greedysnake.config.schema import sections
from greedysnake.config.yaml_text import dump_yaml, parse_yaml
from greedysnake.errors import ConfigError

texts = st.text(min_size=1, max_size=12)
# A path that a file can have; the one that begins with ~ stands for another one.
paths = texts.filter(lambda text: "\0" not in text and not text.startswith("~") and _encodable(text))
path_lists = paths | st.lists(paths, min_size=1, max_size=3)
counts = st.integers(1, 2**63 - 1)
shares = st.floats(0, 1)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
decays = st.floats(0, 1, exclude_max=True)
# Leaves within model.config, of a key that llama's config leaves free in type.
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3),
    max_leaves=6,
)
nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def _encodable(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        return bool(text.encode())
    return False


@st.composite
def run_configs(draw) -> RunConfig:
    steps = draw(st.integers(1, 10**6))
    evaluation, share = draw(st.sampled_from([(None, 0.0), ("one", 0.0), (["a", "b"], 0.0), (None, 0.25)]))
    has_evaluation = evaluation is not None or share > 0
    return RunConfig.model_validate(
        {
            "run": draw(paths),
            "seed": draw(st.integers(0, 2**63 - 1)),
            "model": {
                "path": draw(paths),
                "tokenizer": draw(st.none() | texts.filter(lambda t: t[0] != "~")),
            },
            "data": {
                "train": draw(path_lists),
                "evaluation": evaluation,
                "eval_share": share,
                "text_field": draw(texts),
                "sequence_length": draw(st.integers(2, 2**20)),
            },
            "training": {
                draw(st.sampled_from(["steps", "epochs", "tokens"])): steps,
                "keep_best": has_evaluation and draw(st.booleans()),
                "micro_batches": draw(counts),
                "eval_every": draw(st.none() | counts) if has_evaluation else None,
            },
            "optimizer": {
                "lr": draw(positive),
                "betas": draw(st.tuples(decays, decays)),
                "eps": draw(positive),
                "max_grad_norm": draw(st.none() | positive),
                "warmup_steps": draw(st.integers(0, steps - 1)),
                "min_lr_ratio": draw(shares),
            },
            "engine": {
                "delayed_share": draw(st.none() | shares),
                "host_memory": draw(st.none() | counts),
                "storage": draw(st.none() | st.lists(paths, min_size=1, max_size=3, unique=True)),
                "chunk_elements": draw(st.none() | st.integers(1, 2**40).map(lambda blocks: 4096 * blocks)),
                "gradients": draw(st.sampled_from(["auto", "host", "ssd"])),
            },
        }
    )


def load_text(text: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8", newline="")
        return load_config(path, overrides)


@given(run_configs())
@settings(max_examples=60, deadline=None)
def test_configs_survive_a_round_trip(config):
    assert load_text(dump_config(config)) == config


@given(st.dictionaries(st.text(), plain, max_size=4))
@settings(max_examples=150, deadline=None)
def test_model_configs_survive_a_round_trip(mapping):
    again, duplicates = parse_yaml(dump_yaml(mapping))
    assert again == mapping
    assert not duplicates


def test_a_config_with_random_weights_survives_a_round_trip():
    model = {"model_type": "llama", "hidden_size": 64, "id2label": {0: "a", 1: "b"}, "rms_norm_eps": 1e-6}
    settings_ = {
        "run": "out",
        "model": {"config": model},
        "data": {"train": "text", "sequence_length": 8},
        "training": {"steps": 1},
        "optimizer": {"lr": 1},
    }
    config = RunConfig.model_validate(settings_)
    assert load_text(dump_config(config)) == config
    assert config.model.config == model


KEYS = [(section, key) for section, model in sections().items() for key in model.model_fields]


@given(st.lists(st.tuples(st.sampled_from(KEYS), nonsense), min_size=1, max_size=6), st.data())
@settings(max_examples=120, deadline=None)
def test_nonsense_values_give_nothing_but_a_config_error(changes, data):
    raw = {
        "run": "out",
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": "text", "sequence_length": 8},
        "training": {"steps": 1},
        "optimizer": {"lr": 1},
        "engine": {},
    }
    for (section, key), value in changes:
        target = raw.get(section) if section else raw
        if isinstance(target, dict):
            target[key] = value
    if data.draw(st.booleans()) and isinstance(raw["model"], dict):
        raw["model"]["config"] = {"model_type": "llama"} | data.draw(
            st.dictionaries(st.sampled_from(["hidden_size", "rope_theta", "dtype", "zz", 3]), nonsense, max_size=2)
        )
    with contextlib.suppress(ConfigError):
        config = load_text(dump_yaml(raw))
        assert math.isfinite(config.optimizer.lr)


@given(st.text() | st.text(alphabet="{}[]:,&*!|>'\"-? \nab1.%@#~", max_size=30), st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_nonsense_text_gives_nothing_but_a_config_error(text, override):
    if not _encodable(text):
        text = "x"
    with pytest.raises(ConfigError):
        load_text(text, (override,))
