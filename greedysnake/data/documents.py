"""Rows that keep documents apart: one each, or as many whole ones as fit."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from greedysnake.data.rows import IGNORED_LABEL, Row
from greedysnake.data.token_files import TargetBits, TokenFile
from greedysnake.errors import DataError

LongDocuments = Literal["truncate", "split", "drop"]

PACKING_VERSION = 1
"""Raise it when the same documents come to other rows."""
_PIECES_AT_ONCE = 2**16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CutReport:
    """What became of documents that are longer than a row, or have nothing to learn in them."""

    truncated_documents: int = 0
    truncated_tokens: int = 0
    """Tokens cut off their ends."""
    split_documents: int = 0
    """Documents that became several, without a token lost."""
    dropped_documents: int = 0
    """Too long, and dropped for it."""
    dropped_tokens: int = 0
    """Tokens in these."""
    empty_documents: int = 0
    """Documents, or parts of split ones, without a token to learn, left out."""
    empty_tokens: int = 0
    """Tokens in these."""

    @property
    def lost_tokens(self) -> int:
        """Tokens that no row has."""
        return self.truncated_tokens + self.dropped_tokens + self.empty_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """What goes into rows: whole documents, or parts of long ones.

    Attributes:
        starts: where each begins in the token file, int64 [pieces], rising.
        lengths: tokens, int64 [pieces].
        targets: tokens to learn, int64 [pieces]; the first of a piece never is, as nothing comes before it.
    """

    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentRows:
    """Rows of whole documents, read from disk when they are asked for.

    Attributes:
        tokens_on_disk: every token of the corpus, uint16 or uint32.
        target_bits: which of them are to be learnt; None for all.
        pieces: what the rows are made of.
        order: pieces, row after row, int64 [pieces].
        first: where in ``order`` each row of the corpus begins, and the last one ends, int64 [all rows + 1].
        rows: which rows of the corpus these are, int64 [rows], rising.
        sequence_length: most tokens in a row, T.
        packed: whether a row may have several documents, and so needs to tell where they begin.
        cut: what became of long documents.
    """

    tokens_on_disk: np.ndarray
    target_bits: TargetBits | None
    pieces: Pieces
    order: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    sequence_length: int
    packed: bool
    cut: CutReport

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def padded(self) -> bool:
        """Rows are as long as what is in them."""
        return True

    @property
    def tokens(self) -> int:
        """Tokens in all of these rows, without padding."""
        return self._total(self.pieces.lengths)

    @property
    def targets(self) -> int:
        """Tokens to learn in all of these rows."""
        return self._total(self.pieces.targets)

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the corpus that are in no row."""
        return self.cut.lost_tokens

    def subset(self, rows: np.ndarray) -> Self:
        """Some of these rows, by their numbers."""
        return replace(self, rows=self.rows[rows])

    def row(self, number: int) -> Row:
        """A row by its number, below ``len(self)``."""
        row = self.rows[number]
        members = self.order[self.first[row] : self.first[row + 1]]
        parts = [(int(self.pieces.starts[piece]), int(self.pieces.lengths[piece])) for piece in members]
        ids = np.concatenate([self.tokens_on_disk[start : start + length] for start, length in parts]).astype(np.int64)
        labels = ids.copy()
        if self.target_bits is not None:
            learnt = np.concatenate([self.target_bits.read(start, start + length) for start, length in parts])
            labels[~learnt] = IGNORED_LABEL
        positions = np.concatenate([np.arange(length, dtype=np.int64) for _, length in parts])
        labels[positions == 0] = IGNORED_LABEL
        return Row(ids=ids, labels=labels, positions=positions if self.packed else None)

    def _total(self, values: np.ndarray) -> int:
        sums = np.concatenate([[0], np.cumsum(values[self.order])])
        by_row = sums[self.first[1:]] - sums[self.first[:-1]]
        return int(by_row[self.rows].sum())


def document_rows(
    file: TokenFile, sequence_length: int, *, packed: bool, long_documents: LongDocuments, source: str
) -> DocumentRows:
    """The documents of ``file`` as rows of at most ``sequence_length`` tokens.

    Args:
        file: tokens of documents.
        sequence_length: T.
        packed: whether several documents share a row where they fit; else each has its own.
        long_documents: what to do with documents of more than T tokens.
        source: whose tokens they are, for messages.

    Raises:
        DataError: T is below 2, or no document has anything to learn.
    """
    if sequence_length < 2:
        raise DataError(f"sequence_length is {sequence_length}; at least 2 are needed, to predict one from another")
    pieces, cut = cut_documents(file, sequence_length, long_documents)
    if not len(pieces.lengths):
        raise DataError(
            f"{source}: none of {file.documents} documents has a token to learn within its first {sequence_length} "
            f"({cut.empty_documents} have none, {cut.dropped_documents} are longer and were dropped); raise "
            f"sequence_length, or look at the data with greedysnake preview"
        )
    _tell(cut, file, sequence_length, source)
    if packed:
        order, first = pack_pieces(pieces.lengths, sequence_length)
    else:
        order, first = np.arange(len(pieces.lengths)), np.arange(len(pieces.lengths) + 1)
    return DocumentRows(
        tokens_on_disk=file.open(),
        target_bits=file.targets(),
        pieces=pieces,
        order=order,
        first=first,
        rows=np.arange(len(first) - 1, dtype=np.int64),
        sequence_length=sequence_length,
        packed=packed,
        cut=cut,
    )


def cut_documents(file: TokenFile, longest: int, long_documents: LongDocuments) -> tuple[Pieces, CutReport]:
    """The documents of ``file``, none longer than ``longest`` tokens and each with a token to learn."""
    borders = np.asarray(file.starts())
    starts, lengths = borders[:-1], np.diff(borders)
    long = lengths > longest
    count, surplus = int(long.sum()), int((lengths[long] - longest).sum())
    report = CutReport()
    if count and long_documents == "truncate":
        lengths = np.minimum(lengths, longest)
        report = CutReport(truncated_documents=count, truncated_tokens=surplus)
    elif count and long_documents == "drop":
        report = CutReport(dropped_documents=count, dropped_tokens=int(lengths[long].sum()))
        starts, lengths = starts[~long], lengths[~long]
    elif count:
        parts = -(-lengths // longest)
        number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)  # of a part in its document
        ends = np.repeat(starts + lengths, parts)
        starts = np.repeat(starts, parts) + number * longest
        lengths = np.minimum(ends - starts, longest)
        report = CutReport(split_documents=count)
    targets = np.maximum(lengths - 1, 0) if (bits := file.targets()) is None else bits.count(starts, lengths)
    kept = targets > 0
    report = replace(report, empty_documents=int((~kept).sum()), empty_tokens=int(lengths[~kept].sum()))
    return Pieces(starts=starts[kept], lengths=lengths[kept], targets=targets[kept]), report


def pack_pieces(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces into rows of ``capacity`` tokens: the longest first, each into the row that it fills best.

    (Best-fit decreasing: at most 11/9 of the fewest rows possible, and four more; Johnson 1973.)

    Args:
        lengths: of the pieces, int64 [pieces], each from 1 to ``capacity``.
        capacity: T.

    Returns:
        Pieces row after row, int64 [pieces], and where in them each row begins, int64 [rows + 1]. A row's pieces,
        and the rows by their first piece, stand in the order of the corpus.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the tokens that they still take
    present = 0  # bit n: there is an open row that takes n more tokens
    rows = 0
    for piece, length in _longest_first(lengths):
        fitting = present >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the least that suffices
            row = open_rows[room].pop()
            if not open_rows[room]:
                present ^= 1 << room
        else:
            room, row, rows = capacity, rows, rows + 1
        row_of[piece] = row
        if left := room - length:
            open_rows[left].append(row)
            present |= 1 << left
    first_piece = np.full(rows, len(lengths), dtype=np.int64)
    np.minimum.at(first_piece, row_of, np.arange(len(lengths)))
    number = np.empty(rows, dtype=np.int64)
    number[np.argsort(first_piece)] = np.arange(rows)
    row_of = number[row_of]
    order = np.argsort(row_of, kind="stable")
    return order, np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])


def _longest_first(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Pieces and their lengths, equal ones in the order of the corpus."""
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), _PIECES_AT_ONCE):
        block = order[start : start + _PIECES_AT_ONCE]
        yield from zip(block.tolist(), lengths[block].tolist(), strict=True)


def _tell(cut: CutReport, file: TokenFile, sequence_length: int, source: str) -> None:
    """Say what was lost."""
    long = f"of {file.documents} documents have more than {sequence_length} tokens"
    for count, words, tokens in (
        (cut.truncated_documents, f"{long}; their ends were cut off", cut.truncated_tokens),
        (cut.dropped_documents, f"{long} and were dropped", cut.dropped_tokens),
        (cut.empty_documents, "documents or parts have no token to learn and were left out", cut.empty_tokens),
    ):
        if count:
            logger.warning("%s: %d %s (%d tokens)", source, count, words, tokens)
