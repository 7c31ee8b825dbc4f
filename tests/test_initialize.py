"""Random weights are as transformers makes them."""

from pathlib import Path

import pytest
import torch
from architectures import small_config
from safetensors.torch import load_file
from small_types import small_config_of
from torch import Tensor
from transformers import PretrainedConfig

from greedysnake import Trainer


def fresh(config: PretrainedConfig, folder: Path) -> dict[str, Tensor]:
    with Trainer(config, folder / "store", dtype="float32") as trainer:
        trainer.save_pretrained(folder / "model")
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_the_head_shares_is_initialised_as_an_embedding(tmp_path, tied):
    config = small_config("llama", tie_word_embeddings=tied)
    weight = fresh(config, tmp_path)["model.embed_tokens.weight"]
    assert torch.count_nonzero(weight[config.pad_token_id]) == 0
    assert torch.count_nonzero(weight) == weight.numel() - weight.shape[1]


def test_a_shared_embedding_has_the_spread_of_an_embedding(tmp_path):
    config = small_config_of("youtu")
    assert config.tie_word_embeddings
    weight = fresh(config, tmp_path)["model.embed_tokens.weight"]
    assert weight[1:].std().item() == pytest.approx(config.embedding_initializer_range, rel=0.05)
    assert config.embedding_initializer_range > 1.5 * config.initializer_range
