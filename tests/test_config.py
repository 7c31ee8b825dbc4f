"""Loading of settings: what is accepted, and how every mistake is named."""

from pathlib import Path

import pytest
import transformers
from pydantic import ValidationError

from greedysnake.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    dump_config,
    load_config,
    reference_markdown,
    suggest,
)
from greedysnake.config.reference import updated
from greedysnake.errors import ConfigError

ROOT = Path(__file__).parent.parent

SMALL = """
run: out
model: {path: folder}
data: {train: text.txt, sequence_length: 16}
training: {steps: 10}
optimizer: {lr: 2e-5}
"""


@pytest.fixture
def load(tmp_path):
    """Loads YAML text with overrides."""

    def load_text(text=SMALL, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load_text


@pytest.fixture
def problems(load):
    """The lines of the error, without the first, as a mapping from key to text."""

    def problems_of(text=SMALL, *overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        first, *lines = str(caught.value).split("\n  ")
        assert f"{len(lines)} problem" in first
        assert "\n" not in "".join(lines)
        return dict(line.split(": ", 1) for line in lines)

    return problems_of


def test_small_config_and_its_defaults(load):
    config = load()
    assert config.run == Path("out")
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.data.train == Path("text.txt")
    assert config.model.tokenizer == "folder"
    assert config.engine == EngineConfig()
    assert config.storage_folders == [Path("out/store")]


def test_random_weights_take_the_byte_tokenizer(load):
    assert load(SMALL, "model={config: {model_type: llama}}").model.tokenizer == "bytes"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_parse(example):
    load_config(example)


def test_readers_find_every_key_in_the_docs():
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert text == updated(text), "run: python -m greedysnake.config docs/config.md"
    for section in (ModelConfig, DataConfig, TrainingConfig, OptimizerConfig, EngineConfig):
        assert all(f"| `{key}` |" in reference_markdown() for key in section.model_fields)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.steps=20", "training", "steps", 20),
        ("optimizer.lr=1e-4", "optimizer", "lr", 1e-4),
        ("optimizer.lr='1e-4'", "optimizer", "lr", 1e-4),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("optimizer.betas=[0.5, .9]", "optimizer", "betas", (0.5, 0.9)),
        ("optimizer.max_grad_norm=null", "optimizer", "max_grad_norm", None),
        ("engine.storage=[/a]", "engine", "storage", [Path("/a")]),
        ("engine.storage=[/b, /a]", "engine", "storage", [Path("/b"), Path("/a")]),
        ("engine.host_memory=4GiB", "engine", "host_memory", 4 * 2**30),
        ("engine.chunk_elements=8192", "engine", "chunk_elements", 8192),
        ("engine.snake=false", "engine", "snake", False),
        ("data.train=[a, b]", "data", "train", [Path("a"), Path("b")]),
        ("model.path=1=2", "model", "path", Path("1=2")),
    ],
)
def test_overrides(load, override, section, key, value):
    assert getattr(getattr(load(SMALL, override), section), key) == value


def test_overrides_reach_the_top_level_and_the_inside_of_the_model_config(load):
    text = SMALL.replace("path: folder", "config: &shared {model_type: llama}")
    config = load(text, "run=other", "model.config.hidden_size=64", "model.config.rms_norm_eps=1e-6", "run=last")
    assert config.run == Path("last")
    assert config.model.config == {"model_type": "llama", "hidden_size": 64, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("training.steps=1.5", "training.steps", "found 1.5; needs an integer, at least 1"),
        ("training.steps=1e3", "training.steps", "found 1000.0; needs an integer, at least 1"),
        ("training.steps='10'", "training.steps", "found '10'; needs an integer, at least 1"),
        ("training.steps=true", "training.steps", "found True; needs an integer, at least 1"),
        ("training.steps=0", "training.steps", "found 0; needs an integer, at least 1"),
        (f"training.steps=0x{'f' * 5000}", "training.steps", "a number too long to print; needs an integer"),
        ("seed=-1", "seed", "found -1; needs an integer, at least 0"),
        ("optimizer.lr=true", "optimizer.lr", "found True; needs a finite number, above 0"),
        ("optimizer.lr=.inf", "optimizer.lr", "found inf; needs a finite number, above 0"),
        ("optimizer.lr=fast", "optimizer.lr", "found 'fast'; needs a finite number, above 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas", "needs two numbers, each at least 0 and below 1"),
        ("optimizer.betas=[1, 2]", "optimizer.betas", "needs two numbers, each at least 0 and below 1"),
        ("optimizer.lr_schedule=cosin", "optimizer.lr_schedule", "needs constant or linear or cosine"),
        ("engine.snake=1", "engine.snake", "found 1; needs true or false"),
        ("engine.storage=/a", "engine.storage", "found '/a'; needs a list of one or more folders"),
        ("engine.storage=[/a, /b, /a]", "engine.storage", "each once"),
        (
            "engine.host_memory=4GoB",
            "engine.host_memory",
            "found '4GoB'; needs a size above 0, such as 16GiB",
        ),
        (f"engine.host_memory={'9' * 400}T", "engine.host_memory", "needs a size above 0"),
        ("engine.host_memory=0", "engine.host_memory", "found 0; needs a size above 0"),
        ("engine.chunk_elements=5000", "engine.chunk_elements", "a multiple of 4096"),
        ("data.train=[]", "data.train", "needs a path, or a list of one or more paths"),
        ("data.train=[a, 1]", "data.train", "found ['a', 1]; needs a path"),
        ("data.eval_share=0.6", "data.eval_share", "needs a number, at least 0, at most 0.5"),
        ('run="a\\0b"', "run", "needs a path that a file can have"),
        ('run=""', "run", "found ''; needs a path"),
        ("run=5", "run", "found 5; needs a path (in quotes if it looks like a number or a date)"),
        ("run=2024-05-01", "run", "needs a path (in quotes"),
        ("training=5", "training", "found 5; needs keys of its own, such as steps"),
        ("run.deep=5", "run.deep", "cannot be set: run is 'out', not a mapping"),
        ("model.config=[]", "model.config", "needs a mapping of plain data"),
        ("model.path=null", "model", "missing; write path: <model folder>, or config: {model_type: llama}"),
        ("model.config={model_type: llama}", "model", "path and config are both given"),
        ("training.eval_every=5", "training.eval_every", "found 5, but there is no evaluation data"),
        (
            "optimizer.warmup_steps=10",
            "optimizer.warmup_steps",
            "found 10; needs fewer than training.steps (10)",
        ),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", "unknown key; did you mean optimizer.lr?"),
        ("training.lr=1", "training.lr", "unknown key; did you mean optimizer.lr?"),
        ("training.eval_share=0.1", "training.eval_share", "unknown key; did you mean data.eval_share?"),
        ("optimiser.lr=1", "optimiser", "unknown key; did you mean optimizer?"),
        ("data.qqqq=1", "data.qqqq", "unknown key; known here: train, evaluation, eval_share"),
        ("engine.7=1", "engine.7", "unknown key; known here: schedule"),
        ("training.steps", "override 'training.steps'", "needs the form key=value"),
        ("training..steps=1", "override 'training..steps=1'", "needs the form key=value"),
        ("run=[", "override 'run=['", "line 1, column 2: not valid YAML"),
        ("engine={snake: true, snake: false}", "engine.snake", "given twice"),
    ],
)
def test_one_mistake_gives_one_line(problems, override, key, text):
    found = problems(SMALL, override)
    assert list(found) == [key]
    assert text in found[key]


def test_all_mistakes_are_listed_together(problems):
    found = problems(
        """
sead: 1
model: {path: folder, config: {hidden_size: 64}}
data: {evaluation: more.txt, eval_share: 0.1, seq_len: 16}
training: {steps: 10, micro_batches: "four", steps: 20}
optimizer: {learning_rate: 1, warmup_steps: 30}
engine:
"""
    )
    assert found == {
        "sead": "unknown key; did you mean seed?",
        "run": "missing; write run: runs/first",
        "model": "path and config are both given; keep one of them",
        "model.config.model_type": "missing; write model_type: llama under model.config",
        "data.train": "missing; write train: text/ under data:",
        "data.sequence_length": "missing; write sequence_length: 1024 under data:",
        "data.seq_len": "unknown key; did you mean data.sequence_length?",
        "data.eval_share": "found 0.1, but data.evaluation is given too; keep one of them",
        "training.steps": "given twice, in lines 5 and 5; keep one of them",
        "training.micro_batches": "found 'four'; needs an integer, at least 1",
        "optimizer.learning_rate": "unknown key; did you mean optimizer.lr?",
        "optimizer.warmup_steps": "found 30; needs fewer than training.steps (20)",
        "optimizer.lr": "missing; write lr: 2e-5 under optimizer:",
    }


def test_a_dotted_key_in_the_file_is_told_how_to_be_written(load):
    with pytest.raises(ConfigError, match="unknown key; write lr: on a line of its own, indented under optimizer:"):
        load(SMALL + "optimizer.lr: 3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", "line 1, column 7"),
        ("run: out\n\tx: 1", "line 2, column 1"),
        ("run: \x07", "line 1, column 6: a character that YAML does not allow"),
        ("", "found nothing; needs a mapping of settings"),
        ("- a", "found ['a']; needs a mapping of settings"),
        ("a: 1\n---\nb: 2", "line 2, column 1"),
        ("run: 2024-13-45", "a value cannot be read"),
        ("run: !!python/object:os.system x", "line 1, column 6"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_mapping_of_settings(load, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "a\0b")
    (tmp_path / "latin.yaml").write_bytes("run: ä".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not a text file in UTF-8 \(byte 5\)"):
        load_config(tmp_path / "latin.yaml")


def test_yaml_that_stands_for_itself_or_for_a_billion_entries(problems):
    bomb = "".join(f"  k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 10))
    text = SMALL.replace("model: {path: folder}", f"model:\n config:\n  model_type: llama\n  k0: &k0 [x]\n{bomb}")
    assert "needs at most" in problems(text)["model.config"]
    itself = SMALL.replace("{path: folder}", "{config: &own {model_type: llama, x: *own}}")
    assert "needs at most" in problems(itself)["model.config"]


def test_the_home_folder(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load(SMALL, "run=~/out", "model.tokenizer=~/tokenizer")
    assert config.run == Path("/home/somebody/out")
    assert config.model.tokenizer == "/home/somebody/tokenizer"


@pytest.mark.parametrize(
    ("setting", "key", "text"),
    [
        ("model_type=lama", "model.config.model_type", "transformers knows no 'lama'; did you mean llama?"),
        ("model_type=7", "model.config.model_type", "transformers knows no 7"),
        ("num_hiden_layers=2", "model.config.num_hiden_layers", "did you mean num_hidden_layers?"),
        ("zzzz=2", "model.config.zzzz", "unknown to model type llama"),
        ("hidden_size=wide", "model.config.hidden_size", "found 'wide'; Field 'hidden_size' expected int"),
        ("hidden_size=65", "model.config", "not a multiple of the number of attention heads"),
    ],
)
def test_wrong_model_config(problems, setting, key, text):
    base = SMALL.replace("path: folder", "config: {model_type: llama, num_attention_heads: 4}")
    found = problems(base, f"model.config.{setting}")
    assert list(found) == [key]
    assert text in found[key]


def test_every_wrong_key_of_the_model_config_is_listed_beside_other_mistakes(problems):
    base = SMALL.replace("path: folder", "config: {model_type: llama, hidden_size: 1.5, vocab_size: x, zzzz: 1}")
    keys = ["model.config.hidden_size", "model.config.vocab_size", "model.config.zzzz", "training.steps"]
    assert sorted(problems(base, "training.steps=0")) == keys


@pytest.mark.parametrize(
    "settings",
    [
        "{model_type: gpt2, hidden_size: 32, n_head: 4}",  # a common name that this type maps to its own
        "{model_type: llama, rope_theta: 1e6, torch_dtype: bfloat16}",  # older names, still taken
        "{model_type: llama, hidden_size: 48, num_attention_heads: 3}",  # each wrong with the other's default
    ],
)
def test_model_config_that_transformers_takes(load, settings):
    load(SMALL, "model.path=null", f"model.config={settings}")


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe", "gemma3_text", "opt"])
def test_a_pasted_config_json_has_no_unknown_key(load, tmp_path, model_type):
    transformers.AutoConfig.for_model(model_type, dtype="bfloat16").to_json_file(tmp_path / "config.json", False)
    settings = (tmp_path / "config.json").read_text()  # JSON is YAML too
    config = load(SMALL, "model.path=null", f"model.config={settings}")
    assert config.model.config["model_type"] == model_type


def test_python_use_is_checked_too():
    good = {
        "run": Path("out"),
        "model": ModelConfig(path=Path("folder")),
        "data": DataConfig(train=Path("text"), sequence_length=16),
        "training": TrainingConfig(steps=10),
        "optimizer": OptimizerConfig(lr=1e-4),
    }
    config = RunConfig(**good)
    assert config.engine == EngineConfig()
    with pytest.raises(ValidationError, match="needs fewer than"):
        RunConfig(**{**good, "optimizer": OptimizerConfig(lr=1e-4, warmup_steps=10)})
    with pytest.raises(ValidationError, match="Extra inputs"):
        OptimizerConfig(lr=1e-4, learning_rate=1)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1


def test_text_that_looks_like_a_number_survives_a_round_trip(load):
    config = load(SMALL, "run='1e5'", "data.text_field='2e-5'")
    assert load(dump_config(config)) == config


@pytest.mark.parametrize(
    ("word", "meant"),
    [("LR", "lr"), ("eval-every", "eval_every"), ("step", "steps"), ("zzz", None), ("x" * 10**6, None)],
)
def test_suggest(word, meant):
    assert suggest(word, ["lr", "eval_every", "steps"]) == meant
