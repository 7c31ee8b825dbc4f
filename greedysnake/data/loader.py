"""What training asks for: the micro-batches of a step, by the step's number."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from greedysnake.data.files import FileSurvey, Paths, survey_files, without_files_of
from greedysnake.data.packing import EpochOrder, PackedSequences, pack, split_for_evaluation
from greedysnake.data.tokens import TokenFile, tokenise_files
from greedysnake.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What the training files came to; evaluation files given apart are not counted."""

    files: int
    documents: int
    tokens: int
    """All tokens found, with those kept for evaluation and those dropped."""
    dropped_tokens: int
    """Tokens at the end that filled no sequence."""
    skipped_files: tuple[Path, ...]
    """Files in a folder that are not UTF-8 text."""
    empty_files: tuple[Path, ...]
    """Files in a folder with nothing but white space."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatches:
    """The training data of a run, by step, and its evaluation data.

    The run takes sequence after sequence, in an order that only the data and the seed decide; a step is the
    next ``micro_batches`` x ``micro_batch_size`` of them. So the same step is the same data each time it is
    asked for, and other sizes only group the same sequences differently.
    """

    training: PackedSequences
    held_out: PackedSequences | None
    """The sequences for evaluation."""
    order: EpochOrder
    micro_batch_size: int
    """B, in sequences."""
    micro_batches: int
    """M, for each step."""
    report: DataReport
    fingerprint: str
    """A digest of the tokens, the seed, the split and T: as long as it stays, so does the run's data."""

    def step(self, step: int) -> list[dict[str, Tensor]]:
        """The M micro-batches of step ``step``, counted from 0 and without an end: epochs follow each other.

        Each has ``input_ids`` and ``labels``, int64 [B, T] with the same ids; the model shifts the labels
        itself. There is no ``attention_mask``, as no sequence is padded.
        """
        if step < 0:
            raise ValueError(f"step is {step}; steps are counted from 0")
        numbers = self.order.take(step * self.sequences_per_step, self.sequences_per_step)
        rows = self.training.gather(numbers)
        return [_batch(part) for part in rows.split(self.micro_batch_size)]

    def evaluation(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """The evaluation data, each sequence once, in the order of the text.

        Batches as of `step`, of ``batch_size`` sequences; the last may have fewer. None without evaluation
        data.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; at least 1 is needed")
        if self.held_out is None:
            return
        numbers = np.arange(len(self.held_out))
        for start in range(0, len(numbers), batch_size):
            yield _batch(self.held_out.gather(numbers[start : start + batch_size]))

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 0, that the first sequence of step ``step`` belongs to."""
        return step * self.sequences_per_step // self.sequences

    @property
    def sequences(self) -> int:
        """Training sequences, each taken once an epoch."""
        return len(self.training)

    @property
    def tokens(self) -> int:
        """Tokens in the training sequences."""
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
        """M x B x T."""
        return self.sequences_per_step * self.sequence_length

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every training sequence has been taken once; the last may begin the next epoch."""
        return -(-self.sequences // self.sequences_per_step)


def load_data(
    *,
    train: Paths,
    evaluation: Paths | None = None,
    eval_share: float = 0.0,
    text_field: str = "text",
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    micro_batch_size: int,
    micro_batches: int,
    seed: int,
    cache_dir: str | Path,
    vocab_size: int | None = None,
) -> TokenBatches:
    """Text to token batches: find the files, tokenise them once, cut them into sequences and split them.

    Evaluation data is either ``evaluation``, paths of its own (a training file that is among them is left out
    of training), or the share ``eval_share`` of the training sequences. ``text_field`` is the field with the
    text in JSON lines. Token ids are kept in ``cache_dir``, 2 or 4 bytes each, and used again for the same
    text and tokenizer. With ``vocab_size`` given, every token found is checked against it.

    Raises:
        DataError: a setting is out of range, or the files are missing, damaged, empty or too short.
    """
    for name, value, least in (
        ("micro_batch_size", micro_batch_size, 1),
        ("micro_batches", micro_batches, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise DataError(f"{name} is {value}; set it to {least} or more")
    if evaluation is not None and eval_share:
        raise DataError(
            f"evaluation data is given twice, as files and as eval_share {eval_share}; leave out one of the two"
        )

    def tokens_of(survey: FileSurvey) -> TokenFile:
        file = tokenise_files(survey, tokenizer=tokenizer, text_field=text_field, cache_dir=Path(cache_dir))
        if vocab_size is not None and file.largest_token >= vocab_size:
            raise DataError(
                f"{_name(survey)}: token {file.largest_token} "
                f"({tokenizer.convert_ids_to_tokens(file.largest_token)!r}) occurs, the model's vocab_size "
                f"is {vocab_size}; use the model's own tokenizer, or take this token out of the text"
            )
        return file

    survey = survey_files(train)
    held_out: PackedSequences | None = None
    digests: list[str] = []
    if evaluation is not None:
        evaluation_survey = survey_files(evaluation)
        survey = without_files_of(survey, evaluation_survey)
        evaluation_file = tokens_of(evaluation_survey)
        held_out = pack(evaluation_file.open(), sequence_length, source=f"evaluation data {_name(evaluation_survey)}")
        digests.append(evaluation_file.digest)
    file = tokens_of(survey)
    training = pack(file.open(), sequence_length, source=f"training data {_name(survey)}")
    if evaluation is None:
        training, chosen = split_for_evaluation(training, eval_share=eval_share, seed=seed)
        held_out = chosen if len(chosen) else None
    digests.append(file.digest)
    batches = TokenBatches(
        training=training,
        held_out=held_out,
        order=EpochOrder(len(training), seed),
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        report=DataReport(
            files=len(survey.files),
            documents=file.documents,
            tokens=file.tokens,
            dropped_tokens=training.dropped_tokens,
            skipped_files=survey.not_text,
            empty_files=survey.empty,
        ),
        fingerprint=_fingerprint(digests, sequence_length, eval_share, seed),
    )
    if batches.sequences < batches.sequences_per_step:
        logger.warning(
            "%d training sequences are fewer than the %d of one step: every step takes some more than once; "
            "add text, or lower micro_batches or micro_batch_size",
            batches.sequences,
            batches.sequences_per_step,
        )
    return batches


def check_sequence_length(sequence_length: int, max_positions: int | None, model_name: str) -> None:
    """Make sure that a model with ``max_positions`` positions (None: no limit) takes sequences this long.

    Raises:
        DataError: it does not.
    """
    if max_positions is not None and sequence_length > max_positions:
        raise DataError(
            f"{model_name}: sequence_length is {sequence_length}, the model has {max_positions} positions; "
            f"set sequence_length to {max_positions} or less, or use a model with more positions"
        )


def _batch(input_ids: Tensor) -> dict[str, Tensor]:
    # A copy each: whoever changes the labels in place must not change the input.
    return {"input_ids": input_ids.clone(), "labels": input_ids.clone()}


def _fingerprint(digests: list[str], sequence_length: int, eval_share: float, seed: int) -> str:
    decides = (digests, sequence_length, float(eval_share), seed)
    return hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()


def _name(survey: FileSurvey) -> str:
    first = survey.files[0].path
    return str(first) if len(survey.files) == 1 else f"{first} and {len(survey.files) - 1} more files"
