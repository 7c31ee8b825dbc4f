"""Tokens cut into sequences of one length, and the sequences kept for evaluation."""

import logging
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np

from greedysnake.data.rows import IGNORED_LABEL, Row, Sequences
from greedysnake.data.token_files import TargetBits
from greedysnake.errors import DataError

AnySequences = TypeVar("AnySequences", bound=Sequences)

_SPLIT, _ORDER = 0, 1
"""What a permutation is for, so that one seed gives unrelated ones."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequences:
    """Sequences of T tokens each, read from disk when they are asked for."""

    table: np.ndarray
    """Every sequence of the corpus, [sequences of the corpus, T], uint16 or uint32."""
    rows: np.ndarray
    """Which of them these are, int64 [sequences], rising."""
    dropped_tokens: int
    """Tokens at the corpus' end that filled no sequence, and those of sequences without anything to learn."""
    target_bits: TargetBits | None = None
    """Which tokens of the corpus are to be learnt; None for all."""
    row_targets: np.ndarray | None = None
    """How many those are in each sequence of the corpus, int64; None for all but the first."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sequence_length(self) -> int:
        """T, in tokens."""
        return self.table.shape[1]

    @property
    def packed(self) -> bool:
        """Attention may reach over a whole sequence."""
        return False

    @property
    def padded(self) -> bool:
        """All have T tokens."""
        return False

    @property
    def tokens(self) -> int:
        """Tokens in all of these sequences."""
        return len(self) * self.sequence_length

    @property
    def targets(self) -> int:
        """Tokens to learn in all of these sequences."""
        if self.row_targets is None:
            return len(self) * (self.sequence_length - 1)
        return int(self.row_targets[self.rows].sum())

    def subset(self, rows: np.ndarray) -> Self:
        """Some of these sequences, by their numbers."""
        return replace(self, rows=self.rows[rows])

    def row(self, number: int) -> Row:
        """A sequence by its number, below ``len(self)``."""
        row = int(self.rows[number])
        ids = self.table[row].astype(np.int64)
        labels = ids.copy()
        if self.target_bits is not None:
            start = row * self.sequence_length
            labels[~self.target_bits.read(start, start + self.sequence_length)] = IGNORED_LABEL
        return Row(ids=ids, labels=labels)


def pack(
    tokens: np.ndarray, sequence_length: int, *, source: str, target_bits: TargetBits | None = None
) -> PackedSequences:
    """Cut ``tokens`` (ids [n]) into n // ``sequence_length`` sequences; the tokens left over are dropped.

    Sequences may hold several documents, and documents may go on in the next sequence. Those without a token to
    learn, as ``target_bits`` say, are left out.

    Raises:
        DataError: a sequence would have no token to predict, or there are too few tokens for one, or none is to be
            learnt. ``source`` says in the message whose tokens they are.
    """
    if sequence_length < 2:
        raise DataError(f"sequence_length is {sequence_length}; at least 2 are needed, to predict one from another")
    sequences, dropped = divmod(len(tokens), sequence_length)
    if sequences == 0:
        raise DataError(
            f"{source}: {len(tokens)} tokens found, a sequence needs {sequence_length}; add text, or set "
            f"sequence_length to {max(len(tokens), 2)} or less"
        )
    table = tokens[: sequences * sequence_length].reshape(sequences, sequence_length)
    if dropped:
        logger.info("%s: the last %d of %d tokens fill no sequence and are dropped", source, dropped, len(tokens))
    rows = np.arange(sequences, dtype=np.int64)
    if target_bits is None:
        return PackedSequences(table=table, rows=rows, dropped_tokens=dropped)
    row_targets = target_bits.count(rows * sequence_length, np.full(sequences, sequence_length))
    useful = rows[row_targets > 0]
    if not len(useful):
        raise DataError(f"{source}: none of {len(tokens)} tokens is to be learnt; look at the data")
    if left_out := sequences - len(useful):
        logger.warning("%s: %d of %d sequences have no token to learn and were left out", source, left_out, sequences)
    return PackedSequences(
        table=table,
        rows=useful,
        dropped_tokens=dropped + left_out * sequence_length,
        target_bits=target_bits,
        row_targets=row_targets,
    )


def split_for_evaluation(packed: AnySequences, *, eval_share: float, seed: int) -> tuple[AnySequences, AnySequences]:
    """Training and evaluation sequences: about ``eval_share`` of ``packed`` are for evaluation.

    At least one is if ``eval_share`` is above 0. Which ones depends on ``seed`` and on how many there are, on
    nothing else. No sequence is in both (though text that the corpus holds twice may be).

    Raises:
        DataError: ``eval_share`` is not in 0 <= share < 1, or nothing would be left to train on.
    """
    if not 0 <= eval_share < 1:
        raise DataError(f"eval_share is {eval_share}; it must be at least 0 and below 1, such as 0.01")
    held_out = max(1, round(eval_share * len(packed))) if eval_share > 0 else 0
    if held_out >= len(packed):
        raise DataError(
            f"eval_share {eval_share} takes {held_out} of {len(packed)} sequences and leaves none for "
            f"training; add text, or lower eval_share or sequence_length ({packed.sequence_length})"
        )
    chosen = np.zeros(len(packed), dtype=bool)
    chosen[stable_permutation(len(packed), (seed, _SPLIT))[:held_out]] = True
    return packed.subset(np.flatnonzero(~chosen)), packed.subset(np.flatnonzero(chosen))


class EpochOrder:
    """The order in which a run takes ``count`` sequences: a new permutation an epoch, without end."""

    def __init__(self, count: int, seed: int) -> None:
        """``count`` sequences, at least 1, in the order that ``seed``, at least 0, decides."""
        self.count = count
        self.seed = seed
        self._latest = (0, stable_permutation(count, (seed, _ORDER, 0)))

    def take(self, start: int, length: int) -> np.ndarray:
        """Which sequences (int64 [length]) are number ``start``, ``start`` + 1, ... of the run."""
        taken = np.empty(length, dtype=np.int64)
        filled = 0
        while filled < length:
            epoch, offset = divmod(start + filled, self.count)
            part = self._permutation(epoch)[offset : offset + length - filled]
            taken[filled : filled + len(part)] = part
            filled += len(part)
        return taken

    def _permutation(self, epoch: int) -> np.ndarray:
        # Kept for the next call, as an epoch has many steps. One assignment of a pair: safe with several
        # threads.
        kept_epoch, permutation = self._latest
        if kept_epoch != epoch:
            permutation = stable_permutation(self.count, (self.seed, _ORDER, epoch))
            self._latest = (epoch, permutation)
        return permutation


def stable_permutation(count: int, entropy: tuple[int, ...]) -> np.ndarray:
    """A permutation of 0 ... ``count`` - 1 (int64) that ``entropy`` decides, with every numpy release.

    numpy promises that for a generator's raw bits, not for what `numpy.random.Generator.permutation` makes of
    them, and a run resumed after an upgrade must not see its data in another order.
    """
    bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
