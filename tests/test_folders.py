"""Model folders as they come: hub names, code of their own, quantised ones, more tokens, loads that are broken off."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from commands import Command
from committed import weights_in
from safetensors.torch import load_file, save_file
from small_run import write_config
from test_cli import command  # noqa: F401
from test_export import assert_equal, saved_model, tensors_in
from test_resume import losses_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from greedysnake import AdamW, Lora, Trainer
from greedysnake.data import load_tokenizer
from greedysnake.engine import loading, opening
from greedysnake.errors import ConfigError, ModelError, StorageError
from greedysnake.models.checkpoint import Checkpoint

SMALL = {"dtype": "float32", "chunk_elements": 8192}


def model_folder(folder: Path, **settings) -> Path:
    """A model with the byte tokenizer, for runs of the command line."""
    torch.manual_seed(0)
    config = small_config("llama", vocab_size=258, hidden_size=32, intermediate_size=64, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="50KB")
    load_tokenizer("bytes").save_pretrained(folder)
    return folder


# Loads that are broken off


def die_at(unit: int) -> None:
    loading.COMMIT_BYTES = 1
    fill = Checkpoint.fill

    def fill_or_die(self, skeleton, masters, seed=0):
        if unit in masters:
            os.kill(os.getpid(), signal.SIGKILL)
        fill(self, skeleton, masters, seed)

    Checkpoint.fill = fill_or_die


def die_having_written(unit: int) -> None:
    loading.COMMIT_BYTES = 1
    write = opening.write_unit

    def write_and_die(store, index, *arguments):
        write(store, index, *arguments)
        if index == unit:
            os.kill(os.getpid(), signal.SIGKILL)

    opening.write_unit = write_and_die


@pytest.mark.parametrize(("unit", "die"), [(0, die_at), (1, die_at), (3, die_at), (3, die_having_written)])
def test_a_load_that_is_killed_goes_on_where_it_was(tmp_path, command, monkeypatch, unit, die):  # noqa: F811
    """Also with one slot, once more has been written than the last commit of the load names."""
    model = model_folder(tmp_path / "model")
    path = write_config(tmp_path, model={"path": str(model), "config": None}, engine={"second_slot": die == die_at})
    killed = Command(["train", path], tmp_path / "log", partial(die, unit))
    assert killed.ending()[0] == -signal.SIGKILL
    run = tmp_path / "run"
    for verb in ("export", "verify"):
        status, _, errors = command(verb, run, *([tmp_path / "out"] if verb == "export" else []))
        assert status == 1
        assert ("still being loaded" in errors) == (unit > 0)
    status, _, errors = command("generate", run, "--prompt", "the")
    assert status == 1
    assert "was still being loaded" in errors
    status, _, errors = command("report", run)
    assert status == 1
    assert "nothing to report" in errors
    filled = []
    fill = Checkpoint.fill
    monkeypatch.setattr(Checkpoint, "fill", lambda s, k, m, seed=0: (filled.extend(m), fill(s, k, m, seed)))
    status, output, errors = command("resume", run)
    assert status == 0, errors
    assert "had not begun" in output
    assert filled == {0: [0, 5, 1, 2, 3, 4], 1: [1, 2, 3, 4], 3: [3, 4]}[unit]
    assert "Done: 4 steps" in output
    assert list((run / "store" / "model").glob("loading-*")) == []
    assert command("train", path, f"run={tmp_path / 'whole'}")[0] == 0
    assert losses_of(run) == losses_of(tmp_path / "whole")
    ours, theirs = weights_in(run / "store"), weights_in(tmp_path / "whole" / "store")
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


def broken_off(folder: Path, monkeypatch, model, **settings) -> None:
    """Leave a store with two of its units loaded."""
    write = loading.commit_so_far

    def once(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loading, "COMMIT_BYTES", 1)
        patch.setattr("greedysnake.engine.opening.commit_so_far", once)
        with pytest.raises(KeyboardInterrupt):
            Trainer(model, folder, **{**SMALL, **settings})
    assert loading.half_loaded([folder])["done"] == 1


@pytest.mark.parametrize("change", ["weights", "seed", "damage", "buffers", "model"])
def test_a_load_of_something_else_begins_again(tmp_path, monkeypatch, change):
    saved_model(tmp_path / "in", "deepseek_v3")
    model, settings, store = tmp_path / "in", {}, tmp_path / "store"
    broken_off(store, monkeypatch, model)
    with pytest.raises(StorageError, match="1 of 5 parts"):
        Trainer.resume(store)
    if change == "weights":
        tensors = load_file(model / "model.safetensors")
        tensors["model.embed_tokens.weight"] += 1
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    elif change == "seed":
        settings = {"seed": 1}
    elif change == "damage":
        with (store / "slot1.bin").open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 100)
    elif change == "buffers":
        (store / "model" / "loading-1.safetensors").write_bytes(b"junk")
    else:
        saved_model(tmp_path / "other", "llama")
        model = tmp_path / "other"
    with Trainer(model, store, **SMALL, **settings) as trainer:
        trainer.save_pretrained(tmp_path / "out")
    assert_equal(tensors_in(tmp_path / "out"), tensors_in(model))


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2"])
def test_a_load_goes_on_also_with_random_weights_and_buffers(tmp_path, monkeypatch, name):
    config = small_config(name)
    broken_off(tmp_path / "store", monkeypatch, config)
    with Trainer(config, tmp_path / "store", **SMALL) as trainer:
        trainer.step(random_batches(1)[0])
        buffers = {name: buffer.clone() for name, buffer in trainer.skeleton.model.named_buffers()}
    with Trainer(config, tmp_path / "whole", **SMALL) as trainer:
        trainer.step(random_batches(1)[0])
        assert_equal(buffers, dict(trainer.skeleton.model.named_buffers()))
    assert_equal(weights_in(tmp_path / "store"), weights_in(tmp_path / "whole"))


@pytest.mark.parametrize(
    "settings",
    [{"freeze": ["model.layers.[01].*", "*norm*"]}, {"lora": Lora(r=2, alpha=4), "dtype": "bfloat16"}],
    ids=["frozen", "adapters"],
)
@pytest.mark.parametrize("damaged", [False, True])
def test_a_load_goes_on_also_where_weights_are_written_once(tmp_path, monkeypatch, settings, damaged):
    saved_model(tmp_path / "in", "llama")
    broken_off(tmp_path / "store", monkeypatch, tmp_path / "in", **settings)
    if damaged:
        path = tmp_path / "store" / "fixed.bin"
        path.write_bytes(b"\xff" * path.stat().st_size)
    filled, fill = [], Checkpoint.fill
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "fill", lambda s, k, m, seed=0: (filled.extend(m), fill(s, k, m, seed)))
        with Trainer(tmp_path / "in", tmp_path / "store", **{**SMALL, **settings}) as trainer:
            trainer.step(random_batches(1)[0])
    units = len(trainer.skeleton.layouts)
    assert filled == ([0, units - 1, *range(1, units - 1)] if damaged else [*range(1, units - 1)])
    with Trainer(tmp_path / "in", tmp_path / "whole", **{**SMALL, **settings}) as trainer:
        trainer.step(random_batches(1)[0])
    assert_equal(weights_in(tmp_path / "store"), weights_in(tmp_path / "whole"))


# What is refused, and what is asked first


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_quantised_weights_are_refused_by_name(tmp_path):
    saved_model(tmp_path / "in", "llama")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is quantised: model.layers.1.mlp.up_proj.weight .* F8_E4M3"):
        Trainer(tmp_path / "in", tmp_path / "store", **SMALL)
    edit_config(tmp_path / "in", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"is quantised \(gptq"):
        Trainer(tmp_path / "in", tmp_path / "store", **SMALL)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "{model_type}"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_in_a_model_folder_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    saved_model(tmp_path / "in", "llama")
    model_type = f"own_{tmp_path.name.replace('-', '_')}"
    edit_config(
        tmp_path / "in",
        model_type=model_type,
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    )
    (tmp_path / "in" / "own.py").write_text(CODE.format(model_type=model_type))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    with pytest.raises(ModelError, match=r"own\.py\).*model\.trust_remote_code: true"):
        Trainer(tmp_path / "in", tmp_path / "store", **SMALL)
    with Trainer(tmp_path / "in", tmp_path / "store", **SMALL, trust_remote_code=True) as trainer:
        assert type(trainer.skeleton.model).__name__ == "OwnForCausalLM"
        trainer.save_pretrained(tmp_path / "same")
        trainer.step(random_batches(1)[0])
    with Trainer.resume(tmp_path / "store") as trainer:
        trainer.step(random_batches(1)[0])
        trainer.save_pretrained(tmp_path / "out")
    assert_equal(tensors_in(tmp_path / "same"), tensors_in(tmp_path / "in"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"


def test_a_run_with_code_of_its_own_generates_and_its_storage_is_cleaned_to_the_last_file(tmp_path, command):  # noqa: F811
    model = model_folder(tmp_path / "in")
    model_type = f"own_{tmp_path.name.replace('-', '_')}"
    edit_config(
        model,
        model_type=model_type,
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    )
    (model / "own.py").write_text(CODE.format(model_type=model_type))
    settings = {"path": str(model), "config": None, "trust_remote_code": True}
    path = write_config(tmp_path, model=settings, training={"steps": 1, "eval_every": None})
    status, _, errors = command("train", path)
    assert status == 0, errors
    status, _, errors = command("generate", tmp_path / "run", "--prompt", "the", "--max-new-tokens", "2")
    assert status == 0, errors
    assert (tmp_path / "run" / "store" / "model" / "tokenizer" / "tokenizer.json").is_file()
    status, output, errors = command("clean", tmp_path / "run", "--yes")
    assert status == 0, errors
    assert "Left" not in output
    assert not (tmp_path / "run" / "store").exists()
    status, _, errors = command("generate", tmp_path / "run", "--prompt", "the")
    assert status == 1
    assert "store" in errors
    assert "model.path" not in errors  # it is the run that lacks something, not its settings


def test_parameters_that_text_does_not_reach_are_refused_unless_frozen(tmp_path):
    sizes = {"d_model": 64, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    config = AutoConfig.for_model("bart", **sizes, encoder_layers=4, vocab_size=128, max_position_embeddings=128)
    batch = random_batches(1)[0]
    with (
        Trainer(config, tmp_path / "a", **SMALL) as trainer,
        pytest.raises(ModelError, match=r"parameters get no gradient from text .*encoder_attn.*Freeze them"),
    ):
        trainer.step(batch)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("encoder_attn" not in name)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Trainer(model, tmp_path / "b", **SMALL, optimizer=AdamW(lr=1e-2, weight_decay=0.5)) as trainer:
        trainer.step(batch)
        trainer.save_pretrained(tmp_path / "out")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(after[name], before[name]) == ("encoder_attn" in name) for name in before)


# Names on the hub


def cached(cache: Path, name: str, source: Path) -> None:
    """Lay a model into a hub cache as a download would."""
    folder = cache / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots").mkdir()
    source.rename(folder / "snapshots" / commit)


def test_a_hub_name_is_found_in_the_local_cache(tmp_path, command, monkeypatch):  # noqa: F811
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    cached(tmp_path / "cache", "some-org/small.model", model_folder(tmp_path / "model"))
    path = write_config(tmp_path, model={"path": "some-org/small.model", "config": None})
    status, _, errors = command("train", path)
    assert status == 0, errors
    assert command("export", tmp_path / "run", tmp_path / "out")[0] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"
    status, _, errors = command("train", path, "run=other", "model.path=some-org/unknown")
    assert status == 1
    assert "there is no folder some-org/unknown here" in errors
    assert "hf download some-org/unknown" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "other").exists()


# More tokens than the model has


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral"])
def test_rows_are_added_for_new_tokens(tmp_path, name):
    saved_model(tmp_path / "in", name)
    with Trainer(tmp_path / "in", tmp_path / "store", **SMALL, vocab_size=150) as trainer:
        trainer.save_pretrained(tmp_path / "out")
        batch = random_batches(1)[0]
        batch[0]["input_ids"][0, 3] = batch[0]["labels"][0, 3] = 149
        trainer.step(batch)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 150
    ours, theirs = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "in")
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(ours[key][: len(theirs[key])], theirs[key])
        if ours[key].shape != theirs[key].shape:
            added, mean = ours[key][128:], theirs[key].mean(dim=0)
            assert added.shape[0] == 22
            assert (added - mean).abs().max() < 1e-3 * theirs[key].std()
            assert not torch.equal(added[0], added[1])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.shape[0] == 150
    with Trainer(tmp_path / "in", tmp_path / "again", **SMALL, vocab_size=150) as trainer:
        trainer.save_pretrained(tmp_path / "same")
    assert_equal(tensors_in(tmp_path / "same"), ours)
    with Trainer.resume(tmp_path / "store") as trainer:
        assert trainer.steps_done == 1


def test_rows_are_never_taken_away_and_only_a_folders_are_added(tmp_path):
    saved_model(tmp_path / "in", "llama")
    with pytest.raises(ModelError, match="found 100, and the model has 128 rows"):
        Trainer(tmp_path / "in", tmp_path / "store", **SMALL, vocab_size=100)
    with pytest.raises(ConfigError, match="vocab_size"):
        Trainer(small_config("llama"), tmp_path / "store", **SMALL, vocab_size=200)


def test_the_command_adds_rows_for_the_tokenizers_new_tokens(tmp_path, command):  # noqa: F811
    model = model_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<call>", "</call>"])
    tokenizer.save_pretrained(model)
    path = write_config(tmp_path, model={"path": str(model), "config": None})
    status, _, errors = command("train", path)
    assert status == 1
    assert "the model's vocab_size is 258" in " ".join(errors.split())
    status, _, errors = command("train", path, "model.resize_embeddings=true", "training.steps=2")
    assert status == 0, errors
    assert command("resume", tmp_path / "run", "training.steps=3")[0] == 0
    assert command("export", tmp_path / "run", tmp_path / "out")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 260
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("</call>") == 259


def test_adamw_settings_do_not_matter_to_a_load(tmp_path, monkeypatch):
    saved_model(tmp_path / "in", "llama")
    broken_off(tmp_path / "store", monkeypatch, tmp_path / "in")
    with Trainer(tmp_path / "in", tmp_path / "store", **SMALL, optimizer=AdamW(lr=0.5)) as trainer:
        assert trainer.settings.optimizer.lr == 0.5
