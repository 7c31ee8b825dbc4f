"""Checks of what a training step is given."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from transformers import PretrainedConfig

from greedysnake.errors import DataError
from greedysnake.models.positions import max_positions
from greedysnake.models.streaming import MicroBatch
from greedysnake.plan.activations import BatchShape

IGNORED_LABEL = -100


def check_micro_batches(micro_batches: Sequence[MicroBatch], config: PretrainedConfig) -> BatchShape:
    """The sizes of a step's batch.

    Args:
        micro_batches: each with ``input_ids`` and ``labels``, int64 [B, T], and what else the model takes.
        config: of the model.

    Raises:
        DataError: listing everything that is wrong with them.
    """
    if not micro_batches:
        raise DataError("a step needs at least one micro-batch, got an empty list")
    vocabulary, positions = config.get_text_config().vocab_size, max_positions(config)
    problems: list[str] = []
    rows = tokens = 0
    for index, batch in enumerate(micro_batches):
        name = f"micro-batch {index}"
        if not isinstance(batch, Mapping):
            problems.append(f"{name} is a {type(batch).__name__}, not a dict of tensors")
            continue
        absent = [key for key in ("input_ids", "labels") if not isinstance(batch.get(key), torch.Tensor)]
        if absent:
            problems.append(f"{name} has no tensor {' and no tensor '.join(absent)}")
            continue
        ids, labels = batch["input_ids"], batch["labels"]
        if ids.dim() != 2 or ids.dtype != torch.int64 or labels.shape != ids.shape or labels.dtype != torch.int64:
            problems.append(
                f"{name}: input_ids and labels must be int64 of one shape [rows, tokens], got "
                f"{ids.dtype} {list(ids.shape)} and {labels.dtype} {list(labels.shape)}"
            )
            continue
        if ids.numel() == 0:
            problems.append(f"{name} is empty: input_ids has shape {list(ids.shape)}")
            continue
        problems += [f"{name}: {problem}" for problem in _wrong_inputs(batch, ids)]
        rows, tokens = max(rows, ids.shape[0]), max(tokens, ids.shape[1])
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            problems.append(
                f"{name}: input_ids lie between {int(ids.min())} and {int(ids.max())}, but the model's vocabulary "
                f"has {vocabulary} entries"
            )
        counted = labels[labels != IGNORED_LABEL]
        if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= vocabulary):
            problems.append(
                f"{name}: labels must be {IGNORED_LABEL} or below the vocabulary size {vocabulary}, got "
                f"{int(counted.min())} to {int(counted.max())}"
            )
        if positions is not None and ids.shape[1] > positions:
            problems.append(f"{name} has {ids.shape[1]} tokens in a row, but the model has {positions} positions")
    if not problems and target_tokens(micro_batches) == 0:
        problems.append(f"no label counts: all are {IGNORED_LABEL}, or every row has a single token")
    if problems:
        raise DataError("\n".join(problems))
    return BatchShape(micro_batches=len(micro_batches), rows=rows, tokens=tokens)


def _wrong_inputs(batch: MicroBatch, ids: torch.Tensor) -> Iterator[str]:
    """What is wrong with the attention mask and the positions that come with ``ids``."""
    rows, tokens = ids.shape
    mask = batch.get("attention_mask")
    by_kind = mask if isinstance(mask, Mapping) else {"": mask}
    for kind, found in by_kind.items():
        of = f"attention_mask{f' of {kind}' if kind else ''}"
        if found is None:
            continue
        if not isinstance(found, torch.Tensor):
            yield f"{of} is a {type(found).__name__}, not a tensor"
        elif found.dim() == 2 and found.shape != ids.shape:
            yield f"{of} has shape {list(found.shape)}, input_ids {list(ids.shape)}"
        elif found.dim() == 4 and (found.shape[0] not in (1, rows) or found.shape[2:] != (tokens, tokens)):
            yield f"{of} has shape {list(found.shape)}; [{rows}, 1, {tokens}, {tokens}] fits input_ids"
    positions = batch.get("position_ids")
    if positions is None:
        return
    fits = positions.dim() != 2 or positions.shape in (ids.shape, (1, tokens))  # some models take three of each
    if positions.dtype != torch.int64 or not fits:
        yield f"position_ids must be int64 {list(ids.shape)}, got {positions.dtype} {list(positions.shape)}"


def target_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Labels that count in the loss: position t predicts label t + 1."""
    return sum(int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in micro_batches)
