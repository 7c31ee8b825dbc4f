"""Files to token batches."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from greedysnake.data.batches import DataReport, Packing, TokenBatches
from greedysnake.data.documents import (
    PACKING_VERSION,
    CutReport,
    DocumentRows,
    LongDocuments,
    document_rows,
)
from greedysnake.data.files import FileSurvey, Paths, survey_files, without_files_of
from greedysnake.data.formats import Format, RecordFormat, files_of_format, find_format
from greedysnake.data.packing import EpochOrder, PackedSequences, pack, split_for_evaluation
from greedysnake.data.tokens import TokenFile, tokenise_examples, tokenise_files
from greedysnake.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

AnyPacking = Packing | Literal["auto"]
AnyLongDocuments = LongDocuments | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class _Corpus:
    """One set of files, tokenised and cut into sequences."""

    survey: FileSurvey
    format: Format
    packing: Packing
    long_documents: LongDocuments | None
    """None where their length does not matter."""
    file: TokenFile
    sequences: PackedSequences | DocumentRows

    @property
    def decides(self) -> tuple[object, ...]:
        """All that decides the sequences, but their length."""
        return self.file.digest, self.packing, self.long_documents


@dataclass(frozen=True, kw_only=True)
class _Cutter:
    """Makes sequences of files; its settings are those of :func:`load_data`."""

    wanted: RecordFormat
    packing: AnyPacking
    long_documents: AnyLongDocuments
    tokenizer: "PreTrainedTokenizerBase"
    sequence_length: int
    cache_dir: Path
    vocab_size: int | None

    def corpus(self, survey: FileSurvey, what: str) -> _Corpus:
        """The files that hold what is wanted, tokenised and cut; ``what`` they are for is told in errors."""
        format_ = find_format(survey, self.wanted)
        survey = files_of_format(survey, format_)
        file = self._tokenised(survey, format_)
        how = self.packing if self.packing != "auto" else "whole" if format_ == "text" else "documents"
        source = f"{what} data {_name(survey)}"
        long: LongDocuments | None = None
        sequences: PackedSequences | DocumentRows
        if how == "whole":
            sequences = pack(file.open(), self.sequence_length, source=source, target_bits=file.targets())
        else:
            by_format: LongDocuments = "split" if format_ == "text" else "truncate"
            long = by_format if self.long_documents == "auto" else self.long_documents
            sequences = document_rows(
                file, self.sequence_length, packed=how == "documents", long_documents=long, source=source
            )
        return _Corpus(survey=survey, format=format_, packing=how, long_documents=long, file=file, sequences=sequences)

    def _tokenised(self, survey: FileSurvey, format_: Format) -> TokenFile:
        """The files' tokens, all of which the model has."""
        tokenizer, cache_dir = self.tokenizer, self.cache_dir
        if format_ == "text":
            text_field = self.wanted.text_field
            file = tokenise_files(survey, tokenizer=tokenizer, text_field=text_field, cache_dir=cache_dir)
        else:
            file = tokenise_examples(survey, format_, self.wanted, tokenizer=tokenizer, cache_dir=cache_dir)
        if self.vocab_size is not None and file.largest_token >= self.vocab_size:
            raise DataError(
                f"{_name(survey)}: token {file.largest_token} "
                f"({tokenizer.convert_ids_to_tokens(file.largest_token)!r}) occurs, the model's vocab_size "
                f"is {self.vocab_size}; use the model's own tokenizer, or take this token out of the text"
            )
        return file


def load_data(
    *,
    train: Paths,
    evaluation: Paths | None = None,
    eval_share: float = 0.0,
    record_format: RecordFormat | None = None,
    packing: AnyPacking = "auto",
    long_documents: AnyLongDocuments = "auto",
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    micro_batch_size: int,
    micro_batches: int,
    seed: int,
    cache_dir: str | Path,
    vocab_size: int | None = None,
) -> TokenBatches:
    """Files to token batches: find the files, tokenise them once, cut them into sequences and split them.

    Token ids are kept in ``cache_dir``, 2 or 4 bytes each, and used again for the same contents and tokenizer.

    Args:
        train: files and folders to train on.
        evaluation: files and folders of their own for evaluation; a training file that is among them is left out of
            training.
        eval_share: instead, the share of the training sequences that is for evaluation.
        record_format: what records are, and their fields' names; None: told by their fields.
        packing: ``whole``: documents one after another, cut every T tokens; ``documents``: whole documents, as many
            as fit, attention kept inside each; ``none``: one document a sequence. ``auto``: ``whole`` for text,
            ``documents`` for chats and completions.
        long_documents: for the latter two, documents of more than T tokens: ``truncate``, ``split`` or ``drop`` them.
            ``auto``: ``split`` for text, ``truncate`` for chats and completions.
        tokenizer: makes the tokens.
        sequence_length: T, the most tokens in a sequence.
        micro_batch_size: B, sequences in a micro-batch.
        micro_batches: M, micro-batches in a step.
        seed: of the order and the split.
        cache_dir: folder for tokens, made if missing.
        vocab_size: of the model; every token found is checked against it.

    Raises:
        DataError: a setting is out of range, or the files are missing, damaged, empty or too short.
        ModelError: the tokenizer has no chat template for chats.
    """
    _check_settings(micro_batch_size, micro_batches, seed, evaluation=evaluation, eval_share=eval_share)
    cutter = _Cutter(
        wanted=record_format or RecordFormat(),
        packing=packing,
        long_documents=long_documents,
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        cache_dir=Path(cache_dir),
        vocab_size=vocab_size,
    )
    survey = survey_files(train, "train")
    held_out: PackedSequences | DocumentRows | None = None
    decides: list[tuple[object, ...]] = []
    if evaluation is not None:
        evaluation_survey = survey_files(evaluation, "evaluation")
        survey = without_files_of(survey, evaluation_survey)
        evaluated = cutter.corpus(evaluation_survey, "evaluation")
        held_out = evaluated.sequences
        decides.append(evaluated.decides)
    found = cutter.corpus(survey, "training")
    training = found.sequences
    if evaluation is None:
        training, chosen = split_for_evaluation(training, eval_share=eval_share, seed=seed)
        held_out = chosen if len(chosen) else None
    decides.append(found.decides)
    batches = TokenBatches(
        training=training,
        held_out=held_out,
        order=EpochOrder(len(training), seed),
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        report=_report(found, survey, training),
        fingerprint=_fingerprint(*decides, sequence_length, float(eval_share), seed, PACKING_VERSION),
        pad_token=_pad_token(tokenizer, vocab_size),
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


def _check_settings(
    micro_batch_size: int, micro_batches: int, seed: int, *, evaluation: Paths | None, eval_share: float
) -> None:
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


def _report(found: _Corpus, survey: FileSurvey, training: PackedSequences | DocumentRows) -> DataReport:
    """What was found: the files of ``survey``, and the sequences of ``found`` that are for training."""
    return DataReport(
        files=len(found.survey.files),
        documents=found.file.documents,
        tokens=found.file.tokens,
        dropped_tokens=training.dropped_tokens,
        skipped_files=survey.not_text,
        empty_files=survey.empty,
        other_files=survey.other_split,
        format=found.format,
        packing=found.packing,
        targets=training.targets,
        cut=training.cut if isinstance(training, DocumentRows) else CutReport(),
    )


def _name(survey: FileSurvey) -> str:
    first = survey.files[0].path
    return str(first) if len(survey.files) == 1 else f"{first} and {len(survey.files) - 1} more files"


def _pad_token(tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None) -> int:
    """An id that the model has; no token that is learnt ever sees it."""
    for id_ in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if id_ is not None and (vocab_size is None or id_ < vocab_size):
            return int(id_)
    return 0


def _fingerprint(*decides: object) -> str:
    return hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()
