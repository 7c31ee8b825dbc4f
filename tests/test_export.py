"""Model folders in and out: the same bytes, whole or not at all."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, random_batches, small_config
from commands import Command
from safetensors import safe_open
from safetensors.torch import load_file
from small_run import write_config
from test_cli import command  # noqa: F401
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from greedysnake import AdamW, Trainer
from greedysnake.data import load_tokenizer
from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import read_unit_masters
from greedysnake.errors import ConfigError, ModelError
from greedysnake.models.export import completed_folder
from greedysnake.models.shards import ShardWriter


def saved_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, **settings) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(name)).to(dtype)
    for buffer in model.buffers():
        if buffer.is_floating_point() and "correction" in "".join(n for n, b in model.named_buffers() if b is buffer):
            buffer.normal_()
    model.save_pretrained(folder, **settings)
    return model


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def masters_in(folder: Path) -> dict[str, Tensor]:
    store, skeleton, _ = open_committed([folder])
    try:
        units = range(len(skeleton.layouts))
        return {n: t for u in units for n, t in read_unit_masters(store, u, skeleton.layouts[u]).items()}
    finally:
        store.close()


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [(n, ours[n].dtype, theirs[n].dtype) for n in theirs if ours[n].dtype != theirs[n].dtype] == []
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_folder_that_is_loaded_and_exported_is_the_same_folder(tmp_path, name):
    saved_model(tmp_path / "in", name, max_shard_size="100KB")
    with Trainer(tmp_path / "in", tmp_path / "store", dtype="float32", chunk_elements=8192) as trainer:
        trainer.save_pretrained(tmp_path / "out", max_shard_size="70KB")
    assert_equal(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "in"))
    config, before = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("out", "in"))
    assert config == before


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_neox", "gemma4_shared", "llama_tied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_taken_as_transformers_takes_them(tmp_path, name, dtype):
    kind = getattr(torch, dtype)
    saved_model(tmp_path / "in", name, kind)
    with Trainer(tmp_path / "in", tmp_path / "store", dtype=dtype, chunk_elements=8192) as trainer:
        trainer.save_pretrained(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=kind)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert ours.dtype == kind
    assert_equal(ours.state_dict(), theirs.state_dict())
    stored = tensors_in(tmp_path / "out")
    theirs.save_pretrained(tmp_path / "theirs")
    assert_equal(stored, tensors_in(tmp_path / "theirs"))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits)


@pytest.mark.parametrize("trained", ["bfloat16", "float16", "float32"])
def test_every_dtype_can_be_exported_and_float32_is_the_masters(tmp_path, trained):
    optimizer = AdamW(lr=1e-3)
    with Trainer(small_config("llama"), tmp_path / "store", dtype=trained, optimizer=optimizer) as trainer:
        for batch in random_batches(2):
            trainer.step(batch)
        for dtype in ("bfloat16", "float16", "float32"):
            trainer.save_pretrained(tmp_path / dtype, dtype=dtype)
        trainer.save_pretrained(tmp_path / "default")
    masters = masters_in(tmp_path / "store")
    assert any((tensor.bfloat16().float() != tensor).any() for tensor in masters.values())
    assert_equal(tensors_in(tmp_path / "float32"), masters)
    assert_equal(tensors_in(tmp_path / "default"), tensors_in(tmp_path / trained))
    for dtype in {"bfloat16", "float16"} - {trained}:
        kind = getattr(torch, dtype)
        assert_equal(tensors_in(tmp_path / dtype), {name: tensor.to(kind) for name, tensor in masters.items()})
        assert AutoModelForCausalLM.from_pretrained(tmp_path / dtype).dtype == kind


def test_float16_that_cannot_hold_a_weight_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(small_config("llama"))
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] = 70_000
    with Trainer(model, tmp_path / "store", dtype="bfloat16") as trainer:
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight has values of up to 7e\+04.*float16"):
            trainer.save_pretrained(tmp_path / "out", dtype="float16")
        with pytest.raises(ConfigError, match="int8") as caught:
            trainer.save_pretrained(tmp_path / "out", dtype="int8", max_shard_size="much")
        assert "max_shard_size" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_files_are_no_larger_than_asked_and_tied_weights_are_there_once(tmp_path):
    with Trainer(small_config("llama_tied"), tmp_path / "store", dtype="float32") as trainer:
        trainer.save_pretrained(tmp_path / "one")
        trainer.save_pretrained(tmp_path / "many", max_shard_size="60KiB")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    found = tensors_in(tmp_path / "many")
    assert found.keys() == index["weight_map"].keys()
    assert "lm_head.weight" not in found
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for file in files:
        with safe_open(tmp_path / "many" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 60 * 1024 or len(sizes) == 1
    assert_equal(found, tensors_in(tmp_path / "one"))
    with torch.no_grad():
        one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("one", "many"))
        ids = torch.arange(10)[None]
        assert torch.equal(one(ids).logits, many(ids).logits)


def test_tokenizer_chat_template_and_generation_config_come_along(tmp_path):
    saved_model(tmp_path / "in", "llama")
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "in")
    GenerationConfig(temperature=0.25, do_sample=True, eos_token_id=5).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "README.md").write_text("of another model")
    Trainer(tmp_path / "in", tmp_path / "store").close()
    with Trainer.resume(tmp_path / "store") as trainer:
        trainer.save_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.25
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()


def test_the_command_takes_dtype_and_size_and_replaces_only_when_told(tmp_path, command):  # noqa: F811
    assert command("train", write_config(tmp_path))[0] == 0
    run, out = tmp_path / "run", tmp_path / "out"
    status, _, errors = command("export", run, out, "--dtype", "int8", "--max-shard-size", "none")
    assert status == 1
    assert "dtype: 'int8'" in errors
    assert "max_shard_size" in errors
    assert command("export", run, out, "--dtype", "float32", "--max-shard-size", "20KB")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32
    assert len(list(out.glob("*.safetensors"))) > 2
    status, _, errors = command("export", run, out)
    assert status == 1
    assert "--overwrite" in errors
    (out / "mine.txt").write_text("of the model that is replaced")
    assert command("export", run, out, "--overwrite")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out).eos_token == "<|endoftext|>"
    assert len(list(out.glob("*.safetensors"))) == 1
    assert not (out / "mine.txt").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("precious")
    for target in (other, run, run / "store", run / "store" / "model", tmp_path):
        status, _, errors = command("export", run, target, "--overwrite")
        assert status == 1, target
        assert "Choose another folder" in errors
    assert (other / "letter.txt").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert command("verify", run)[0] == 0


def test_an_export_that_is_killed_leaves_nothing_that_looks_like_a_model(tmp_path, command):  # noqa: F811
    assert command("train", write_config(tmp_path))[0] == 0
    run, out = tmp_path / "run", tmp_path / "out"
    killed = Command(["export", run, out], tmp_path / "log", kill_in_the_second_unit)
    assert killed.ending()[0] == -signal.SIGKILL
    assert not out.exists()
    (left,) = tmp_path.glob(".out.partial-*")
    assert not (left / "config.json").exists()
    assert command("export", run, out)[0] == 0
    assert list(tmp_path.glob(".out.*")) == []
    AutoModelForCausalLM.from_pretrained(out)


def kill_in_the_second_unit() -> None:
    flush, calls = ShardWriter.flush, []

    def flush_or_die(self: ShardWriter) -> None:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(self)

    ShardWriter.flush = flush_or_die


@pytest.mark.parametrize("own", [True, False])
def test_what_a_killed_export_left_is_put_right(tmp_path, own):
    """Also where the dead process had this one's number, as the first one of every container has."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    number, out = os.getpid() if own else dead.pid, tmp_path / "out[1]"

    def leave(what: str, process: int = number) -> Path:
        path = tmp_path / f".{out.name}.{what}-{process}"
        path.mkdir()
        (path / "config.json").write_text(what)
        return path

    leave("replaced")  # killed after the model that was there was renamed, and before the new one was
    leave("partial")
    of_others = [leave("partial", os.getppid()), leave(f"partial-{number}.partial")]
    with pytest.raises(ModelError, match="--overwrite"), completed_folder(out, overwrite=False):
        pass
    assert (out / "config.json").read_text() == "replaced"
    leave("partial")
    with completed_folder(out, overwrite=True) as partial:
        (partial / "config.json").write_text("new")
    leave("replaced")  # killed after both
    with pytest.raises(ModelError, match="--overwrite"), completed_folder(out, overwrite=False):
        pass
    assert (out / "config.json").read_text() == "new"
    assert sorted(tmp_path.iterdir()) == sorted([out, *of_others])


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    import shutil

    with Trainer(small_config("llama"), tmp_path / "store") as trainer:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        with pytest.raises(ModelError, match=r"too small for the export.*10,000 bytes"):
            trainer.save_pretrained(tmp_path / "out")
        monkeypatch.undo()
    assert not (tmp_path / "out").exists()
