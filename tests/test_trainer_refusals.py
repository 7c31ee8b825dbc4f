"""The Python interface: what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from architectures import random_batches, small_config
from torch import nn
from trainers import export, trainer_for
from transformers import AutoModelForCausalLM

from greedysnake import Trainer
from greedysnake.errors import ConfigError, DataError, MemoryBudgetError, ModelError, StorageError


def test_a_looped_model_is_refused_by_its_type(tmp_path, monkeypatch):
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaModel.forward

    def twice(self, *args, **kwargs):
        original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", twice)
    with trainer_for(tmp_path) as trainer, pytest.raises(ModelError, match="'llama' cannot be trained"):
        trainer.step(random_batches(1)[0])


def test_a_model_without_a_list_of_layers_is_refused(tmp_path, monkeypatch):
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaModel.__init__

    def odd(self, config):
        original(self, config)
        self.layers = nn.Sequential(*self.layers)

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", odd)
    with pytest.raises(ModelError, match=r"'llama'.*no list of modules has the config's 4 layers"):
        trainer_for(tmp_path)


def test_arguments_are_refused_all_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        Trainer(
            small_config("llama"),
            [],
            dtype="int4",
            device="tpu",
            schedule="diagonal",
            layers_per_unit=0,
            delayed_share=2,
            boundaries_on_ssd=1.5,
            gradients="device",
            host_memory="much",
            max_skipped_steps=0,
            chunk_elements=1000,
        )
    names = "storage dtype device schedule layers_per_unit delayed_share boundaries_on_ssd gradients host_memory"
    for name in [*names.split(), "max_skipped_steps", "chunk_elements"]:
        assert f"{name}:" in str(caught.value)


def test_too_little_memory_names_needed_and_found(tmp_path):
    with trainer_for(tmp_path, host_memory="100MiB") as trainer, pytest.raises(MemoryBudgetError) as caught:
        trainer.step(random_batches(1)[0])
    assert "may use 100 MiB" in str(caught.value)
    assert "engine.host_memory" in str(caught.value)


def test_a_storage_folder_serves_one_run(tmp_path):
    with trainer_for(tmp_path), pytest.raises(StorageError, match="in use by process"):
        trainer_for(tmp_path)
    with pytest.raises(StorageError, match="already holds the store of another run"):
        trainer_for(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors weights"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickle"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk" * 99), "cannot be read"),
        (lambda folder: _edit(folder, hidden_size=32), "do not fit|cannot be read"),
        (lambda folder: _edit(folder, num_hidden_layers=5), "lacks 9 weights"),
    ],
)
def test_a_broken_model_folder_is_refused_and_leaves_the_storage_free(tmp_path, change, message):
    AutoModelForCausalLM.from_config(small_config("llama")).save_pretrained(tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ModelError, match=message) as caught:
        Trainer(tmp_path / "model", tmp_path / "store")
    assert str(tmp_path / "model") in str(caught.value)
    trainer_for(tmp_path).close()


def _edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_missing_model_folder_and_odd_batches_are_refused(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        Trainer(tmp_path / "nowhere", tmp_path / "store")
    with pytest.raises(ModelError, match="got int"):
        Trainer(7, tmp_path / "store")
    with trainer_for(tmp_path) as trainer:
        before = export(trainer, tmp_path / "before")
        with pytest.raises(DataError, match="no tensor labels"):
            trainer.step([{"input_ids": torch.zeros(1, 4, dtype=torch.long)}])
        after = export(trainer, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_does_not_overwrite(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    with trainer_for(tmp_path) as trainer, pytest.raises(ModelError, match="exists already"):
        trainer.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "mine"
