"""Rows of tokens, and the micro-batch that some of them make."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of a token that is not to be learnt; transformers' losses leave it out."""

AttentionInputs = Callable[[Tensor], Mapping[str, Any]]
"""What keeps documents apart: a model's inputs for ``position_ids`` int64 [B, T] that begin again at each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """Tokens of one sequence.

    Attributes:
        ids, labels: int64 [tokens]; the label of a token stands at its own place, the model shifts.
        positions: int64 [tokens], beginning again at 0 with each document that attention must stay in; None where
            it may reach over the whole row.
    """

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None

    @property
    def learnt(self) -> np.ndarray:
        """Which tokens count in the loss, bool [tokens]: those with a label and something before them."""
        learnt = self.labels != IGNORED_LABEL
        learnt[:1] = False
        return learnt


class Sequences(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    @property
    def sequence_length(self) -> int:
        """Most tokens in a row, T."""

    @property
    def packed(self) -> bool:
        """Whether a row may have several documents between which attention must not reach."""

    @property
    def padded(self) -> bool:
        """Whether rows may differ in length."""

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""

    @property
    def targets(self) -> int:
        """Tokens to learn in all rows."""

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the corpus that are in no row."""

    def subset(self, rows: np.ndarray) -> Self:
        """Some of the rows, by their numbers, int64, rising."""

    def row(self, number: int) -> Row:
        """One of them."""


def position_inputs(position_ids: Tensor) -> Mapping[str, Any]:
    """What tells most models where documents begin: their positions."""
    return {"position_ids": position_ids}


def collate(rows: Sequence[Row], *, pad_token: int, attention: AttentionInputs) -> dict[str, Any]:
    """Rows as a micro-batch, padded on the right to the longest.

    Returns:
        ``input_ids`` and ``labels``, int64 [B, tokens]; with padding ``attention_mask``, 1 where there is a token;
        in its place, for rows of several documents, what ``attention`` makes of their positions, the padding being a
        document of its own.
    """
    longest = max(len(row.ids) for row in rows)
    padded = any(len(row.ids) < longest for row in rows)
    batch: dict[str, Any] = {
        "input_ids": _stack([row.ids for row in rows], longest, pad_token),
        "labels": _stack([row.labels for row in rows], longest, IGNORED_LABEL),
    }
    if any(row.positions is not None and (row.positions[1:] == 0).any() for row in rows):
        positions = torch.arange(longest).repeat(len(rows), 1)
        for number, row in enumerate(rows):
            if row.positions is not None:
                positions[number, : len(row.ids)] = torch.from_numpy(row.positions)
            positions[number, len(row.ids) :] = torch.arange(longest - len(row.ids))
        batch.update(attention(positions))
    elif padded:
        batch["attention_mask"] = _stack([np.ones(len(row.ids), dtype=np.int64) for row in rows], longest, 0)
    return batch


def _stack(parts: Sequence[np.ndarray], length: int, fill: int) -> Tensor:
    stacked = torch.full((len(parts), length), fill, dtype=torch.int64)
    for number, part in enumerate(parts):
        stacked[number, : len(part)] = torch.from_numpy(part)
    return stacked
