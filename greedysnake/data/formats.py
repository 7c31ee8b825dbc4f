"""What a record is: text, a chat, or a prompt with its completion, and which of its fields hold it."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from greedysnake.data.files import FileSurvey, SourceFile
from greedysnake.data.records import Record, first_record, listed
from greedysnake.errors import DataError

Format = Literal["text", "chat", "completion"]

_HINTS = {
    ("conversations",): "rename 'conversations' to 'messages', each with 'role' and 'content'",
    ("instruction", "output"): "set data.prompt_field to instruction and data.completion_field to output",
    ("question", "answer"): "set data.prompt_field to question and data.completion_field to answer",
}
"""What to do about layouts of records that others use."""

_WORDS: dict[Format, str] = {"text": "text", "chat": "chats", "completion": "completions"}

_SET: dict[Format, str] = {
    "text": "set text_field to the field with the text",
    "chat": "set messages_field to the field with the messages",
    "completion": "set prompt_field and completion_field to the fields with them",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """What the user says of records: what they are, or ``auto`` to tell by their fields, and the fields' names."""

    format: Literal["auto", "text", "chat", "completion"] = "auto"
    text_field: str = "text"
    messages_field: str = "messages"
    prompt_field: str = "prompt"
    completion_field: str = "completion"

    def fields(self, format_: Format) -> tuple[str, ...]:
        """The fields that a record of this format must have."""
        if format_ == "text":
            return (self.text_field,)
        return (self.messages_field,) if format_ == "chat" else (self.prompt_field, self.completion_field)

    def example(self, format_: Format) -> str:
        """A record of this format, for messages."""
        if format_ == "chat":
            return f'{{"{self.messages_field}": [{{"role": "user", "content": "..."}}, ...]}}'
        return "{" + ", ".join(f'"{field}": "..."' for field in self.fields(format_)) + "}"


def find_format(survey: FileSurvey, wanted: RecordFormat) -> Format:
    """The one format of all files in ``survey``: what ``wanted`` says, or what the first record of each shows.

    Files of plain text that lie in a folder beside chats or completions (a README, say) do not count.

    Raises:
        DataError: a record fits none of the formats, or more than one, or files differ.
    """
    if wanted.format != "auto":
        return wanted.format
    found: dict[Format, Path] = {}
    for file in survey.files:
        format_ = _format_of(file, wanted)
        if format_ is not None:
            found.setdefault(format_, file.path)
    if not found:
        return "text"
    if len(found) > 1:
        told = ", ".join(f"{path} holds {_WORDS[format_]}" for format_, path in found.items())
        raise DataError(f"the data is of several kinds: {told}; name files of one kind, or set data.format")
    return next(iter(found))


def files_of_format(survey: FileSurvey, format_: Format) -> FileSurvey:
    """``survey`` with the files that can hold ``format_``: plain text holds no chats and no completions.

    Raises:
        DataError: such a file was named directly, or nothing is left.
    """
    if format_ == "text":
        return survey
    plain = [file for file in survey.files if file.kind == "text"]
    for file in plain:
        if file.named:
            raise DataError(
                f"{file.path}: plain text among {_WORDS[format_]}; put it into records (JSON lines or Parquet), or "
                "leave it out"
            )
    kept = tuple(file for file in survey.files if file.kind != "text")
    if not kept:
        raise DataError(
            f"{plain[0].path}: {_WORDS[format_]} come from JSON lines, Parquet or saved datasets, and there are only "
            f"{len(plain)} files of plain text; name others, or set data.format to text"
        )
    if plain:
        logger.warning(
            "%d files of plain text lie among %s and were left out, the first is %s",
            len(plain),
            _WORDS[format_],
            plain[0].path,
        )
    return replace(survey, files=kept)


def missing_fields(record: Record, format_: Format, wanted: RecordFormat) -> str | None:
    """What is wrong with the fields of ``record``, if any that it must have is missing."""
    missing = [name for name in wanted.fields(format_) if name not in record.fields]
    if not missing:
        return None
    word = "field" if len(missing) == 1 else "fields"
    found = listed(list(record.fields))
    return f"{record.place}: no {word} {listed(missing)} (fields found: {found}); {_SET[format_]}"


def _format_of(file: SourceFile, wanted: RecordFormat) -> Format | None:
    """What the first record of ``file`` shows; None for plain text and where no record can be read."""
    record = None if file.kind == "text" else first_record(file)
    if record is None:
        return None
    fitting = [format_ for format_ in get_args(Format) if all(f in record.fields for f in wanted.fields(format_))]
    found = listed(list(record.fields))
    if not fitting:
        needed = ", or ".join(" and ".join(map(repr, wanted.fields(format_))) for format_ in get_args(Format))
        hints = [hint for fields, hint in _HINTS.items() if all(field in record.fields for field in fields)]
        advice = hints[0] if hints else "set the field's name, such as text_field, in the settings of the data"
        raise DataError(f"{record.place}: no field {needed} (fields found: {found}); {advice}")
    if len(fitting) > 1:
        raise DataError(
            f"{record.place}: can be {' or '.join(fitting)} (fields found: {found}); set data.format to one of them"
        )
    return fitting[0]
