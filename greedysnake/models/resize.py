"""More rows in a model's embedding and head than its weights have, for tokens that were added to its tokenizer."""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from greedysnake.errors import ModelError
from greedysnake.models.initialize import mix_seed
from greedysnake.models.lora import base_name

_SPREAD = math.sqrt(1e-9)


def with_vocabulary(config: PretrainedConfig, rows: int | None) -> PretrainedConfig:
    """The config with so many rows in embedding and head; the same config if it has as many, or ``rows`` is None.

    Raises:
        ModelError: the model has more rows.
    """
    before = config.get_text_config().vocab_size
    if rows is None or rows == before:
        return config
    if rows < before:
        raise ModelError(
            f"model.resize_embeddings: found {rows:,}, and the model has {before:,} rows, which are kept; needs at "
            f"least as many"
        )
    config = copy.deepcopy(config)
    if hasattr(config, "vocab_size"):
        config.vocab_size = rows
    config.get_text_config().vocab_size = rows
    return config


def resizable_parameters(model: PreTrainedModel) -> set[str]:
    """Full names of the parameters with a row for each token: of the embedding, and of the head with its bias.

    The names are those without adapters.
    """
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if isinstance(end, nn.Module)]
    own = {id(p) for end in ends for p in getattr(end, "base_layer", end).parameters(recurse=False)}
    named = model.named_parameters(remove_duplicate=False)
    return {base_name(name) for name, parameter in named if id(parameter) in own}


def fill_more_rows(target: Tensor, rows: Tensor, seed: int) -> None:
    """Copy what there is, and draw the rest.

    New rows are drawn around the mean of the old ones, each coordinate with 1e-9 of its variance: as
    ``resize_token_embeddings(mean_resizing=True)`` does (https://nlp.stanford.edu/~johnhew/vocab-expansion.html), but
    without the covariances, so that memory of the square of the model's width is not needed. A new token then takes
    next to nothing from the probabilities of the others.

    Args:
        target: float32 [more rows, ...].
        rows: float32 [rows, ...].
        seed: of the draw.
    """
    count = rows.shape[0]
    target[:count].copy_(rows)
    generator = torch.Generator().manual_seed(mix_seed(seed, count, target.shape[0]))
    noise = torch.randn(target[count:].shape, generator=generator)
    spread = rows.std(dim=0, correction=0) * _SPREAD
    target[count:].copy_(noise.mul_(spread).add_(rows.mean(dim=0)))
