"""What training asks for: the micro-batches of a step, by the step's number."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from greedysnake.data.documents import CutReport
from greedysnake.data.formats import Format
from greedysnake.data.packing import EpochOrder
from greedysnake.data.rows import AttentionInputs, Row, Sequences, collate, position_inputs

Packing = Literal["documents", "whole", "none"]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What the training files came to; evaluation files given apart are not counted."""

    files: int
    documents: int
    tokens: int
    """All tokens found, with those kept for evaluation and those dropped."""
    dropped_tokens: int
    """Tokens that are in no sequence: at the end of a corpus, cut off long documents, with nothing to learn."""
    skipped_files: tuple[Path, ...]
    """Files in a folder that are not UTF-8 text."""
    empty_files: tuple[Path, ...]
    """Files in a folder with nothing but white space."""
    other_files: tuple[Path, ...] = ()
    """Files in a folder whose names say that they are for evaluation."""
    format: Format = "text"
    """What the records are."""
    packing: Packing = "whole"
    """How documents share sequences."""
    targets: int = 0
    """Tokens to learn in the training sequences."""
    cut: CutReport = field(default_factory=CutReport)
    """What became of documents longer than a sequence, where sequences keep documents apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatches:
    """The training data of a run, by step, and its evaluation data.

    The run takes sequence after sequence, in an order that only the data and the seed decide; a step is the
    next ``micro_batches`` x ``micro_batch_size`` of them. So the same step is the same data each time it is
    asked for, and other sizes only group the same sequences differently.
    """

    training: Sequences
    held_out: Sequences | None
    """The sequences for evaluation."""
    order: EpochOrder
    micro_batch_size: int
    """B, in sequences."""
    micro_batches: int
    """M, for each step."""
    report: DataReport
    fingerprint: str
    """A digest of all that decides the run's data: as long as it stays, so does every step's."""
    pad_token: int = 0
    """The id that fills sequences up to the longest of their micro-batch."""
    attention: AttentionInputs = position_inputs
    """What keeps the documents of a sequence apart in the model at hand."""

    def with_attention(self, attention: AttentionInputs) -> Self:
        """The same batches for a model in which ``attention`` keeps documents apart."""
        return replace(self, attention=attention)

    def step(self, step: int) -> list[dict[str, Any]]:
        """The M micro-batches of step ``step``, counted from 0 and without an end: epochs follow each other.

        Each has ``input_ids`` and ``labels``, int64 [B, tokens], and what `collate` adds for padding and for
        several documents in a sequence. The model shifts the labels itself; those of tokens that are not to be
        learnt, and of a document's first where documents are kept apart, are -100.
        """
        return [self._collate(rows) for rows in self.rows(step)]

    def rows(self, step: int) -> list[list[Row]]:
        """The sequences of each micro-batch of `step`, before padding."""
        if step < 0:
            raise ValueError(f"step is {step}; steps are counted from 0")
        numbers = self.order.take(step * self.sequences_per_step, self.sequences_per_step)
        rows = [self.training.row(int(number)) for number in numbers]
        return [rows[at : at + self.micro_batch_size] for at in range(0, len(rows), self.micro_batch_size)]

    def evaluation(self, batch_size: int) -> Iterator[dict[str, Any]]:
        """The evaluation data, each sequence once, in the order of the text.

        Batches as of `step`, of ``batch_size`` sequences; the last may have fewer. None without evaluation
        data.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; at least 1 is needed")
        if self.held_out is None:
            return
        for start in range(0, len(self.held_out), batch_size):
            numbers = range(start, min(start + batch_size, len(self.held_out)))
            yield self._collate([self.held_out.row(number) for number in numbers])

    @property
    def packed(self) -> bool:
        """Whether a sequence may have several documents between which attention must not reach."""
        return any(sequences.packed for sequences in (self.training, self.held_out) if sequences is not None)

    @property
    def padded(self) -> bool:
        """Whether sequences of a micro-batch may differ in length."""
        return any(sequences.padded for sequences in (self.training, self.held_out) if sequences is not None)

    @property
    def sequences(self) -> int:
        """Training sequences, each taken once an epoch."""
        return len(self.training)

    @property
    def tokens(self) -> int:
        """Tokens in the training sequences, without padding."""
        return self.training.tokens

    @property
    def sequence_length(self) -> int:
        """T, in tokens."""
        return self.training.sequence_length

    @property
    def evaluation_sequences(self) -> int:
        """Sequences for evaluation."""
        return 0 if self.held_out is None else len(self.held_out)

    @property
    def sequences_per_step(self) -> int:
        """M x B."""
        return self.micro_batches * self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        """M x B x T, the most that a step can have."""
        return self.sequences_per_step * self.sequence_length

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every training sequence has been taken once; the last may begin the next epoch."""
        return -(-self.sequences // self.sequences_per_step)

    def _collate(self, rows: list[Row]) -> dict[str, Any]:
        return collate(rows, pad_token=self.pad_token, attention=self.attention)
