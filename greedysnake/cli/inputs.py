"""What a run is fed with: its model, tokenizer and data, checked against each other."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from greedysnake.cli.data import load_run_data
from greedysnake.cli.length import planned_steps
from greedysnake.cli.model import config_from_settings
from greedysnake.config import RunConfig
from greedysnake.data import (
    TokenBatches,
    check_sequence_length,
    check_vocabulary,
    load_tokenizer,
    token_id_bound,
    use_chat_template,
)
from greedysnake.engine.opening import config_of
from greedysnake.errors import ConfigError, DataError, GreedySnakeError
from greedysnake.models.hub import local_folder
from greedysnake.models.positions import max_positions
from greedysnake.models.resize import with_vocabulary

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run is made from, checked against each other."""

    model: str | Path | PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    batches: TokenBatches
    mask_bytes: int
    steps: int
    """Of the whole run."""
    vocab_size: int | None = None


def prepare_inputs(config: RunConfig, cache_dir: Path | None = None) -> Inputs:
    """Model config, tokenizer and data, with every problem of the three in one message.

    Tokens are kept in ``data.cache``, else in ``cache_dir``, else in the run's folder.
    """
    problems: list[str] = []

    def attempt(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except GreedySnakeError as error:
            problems.append(str(error))
            return None

    path, trusted = config.model.path, config.model.trust_remote_code
    model = attempt(lambda: config_from_settings(config) if path is None else local_folder(path, with_code=trusted))
    model_config = None if model is None else attempt(lambda: config_of(model, trust_remote_code=trusted))
    source: str | Path | None = config.model.tokenizer or "bytes"
    if path is not None and source == str(path):
        source = None if model_config is None else str(model)  # one message on a folder that is missing
    tokenizer = None if source is None else attempt(lambda: load_tokenizer(source))
    template = config.data.chat_template
    if tokenizer is not None and template is not None:
        attempt(lambda: use_chat_template(tokenizer, template))
    rows = None
    if model_config is not None and tokenizer is not None and config.model.resize_embeddings:
        rows = wanted_rows(config.model.resize_embeddings, tokenizer, model_config)
        before = model_config
        model_config = attempt(lambda: with_vocabulary(before, rows))
    kind = (config.model.config or {}).get("model_type")
    name = str(config.model.path) if config.model.path else f"the {kind} of model.config"
    if model_config is not None:
        length, positions = config.data.sequence_length, max_positions(model_config)
        vocabulary = model_config.get_text_config().vocab_size
        attempt(lambda: check_sequence_length(length, positions, name))
        if tokenizer is not None:
            attempt(lambda: check_vocabulary(tokenizer, vocabulary, name))
    paths = [config.data.train, *([config.data.evaluation] if config.data.evaluation else [])]
    for path in (p for group in paths for p in (group if isinstance(group, list) else [group])):
        if not Path(path).exists():
            problems.append(f"data: {path} does not exist")
    data = None
    if not problems and tokenizer is not None and model_config is not None:
        data = attempt(lambda: load_run_data(config, tokenizer, model_config, cache_dir))
    steps = None if data is None else attempt(lambda: planned_steps(config, data.batches))
    if problems or data is None or tokenizer is None or steps is None or model is None:
        raise DataError("\n".join(problems)) if len(problems) == 1 else ConfigError("\n".join(problems))
    return Inputs(
        model=model,
        tokenizer=tokenizer,
        batches=data.batches,
        mask_bytes=data.mask_bytes,
        steps=steps,
        vocab_size=rows,
    )


def wanted_rows(setting: bool | int, tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig) -> int:
    """Rows that embedding and head are to have by ``model.resize_embeddings``; true never takes any away."""
    if setting is True:
        return max(token_id_bound(tokenizer), model_config.get_text_config().vocab_size)
    return int(setting)
