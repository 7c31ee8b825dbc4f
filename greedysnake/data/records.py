"""Records of JSON lines, Parquet and Arrow files, one at a time, each with its place for a message."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greedysnake.data.files import SourceFile
from greedysnake.data.tables import dataset_rows, parquet_rows
from greedysnake.errors import DataError


class Problems:
    """Bad records, gathered so that one message names many.

    Args:
        most: problems that are named.
        further: records that are still looked at after the first bad one.
    """

    def __init__(self, most: int = 20, further: int = 10_000) -> None:
        self._most, self._further = most, further
        self._found: list[str] = []
        self._records_since = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, problem: str) -> None:
        """Take a problem, and raise what there is if it is the last one wanted.

        Raises:
            DataError: see above.
        """
        self._found.append(problem)
        if len(self._found) >= self._most:
            raise self._error(f"These are the first {self._most} problems; there may be more.")

    def passed(self) -> None:
        """Count a record that was looked at.

        Raises:
            DataError: enough were, after the first bad one.
        """
        if self._found:
            self._records_since += 1
            if self._records_since > self._further:
                raise self._error(f"The {self._further:,} records after the first problem were looked at, no more.")

    def settle(self) -> None:
        """Raise what was found, if anything.

        Raises:
            DataError: naming all of it.
        """
        if self._found:
            raise self._error()

    def _error(self, ending: str = "") -> DataError:
        ending = ending if len(self._found) > 1 else ""
        return DataError("\n".join([*self._found, *([ending] if ending else [])]))


@dataclass(frozen=True, kw_only=True)
class Record:
    """Fields by name, and where they stand: a file and a line or row, counted from 1."""

    place: str
    fields: dict[str, Any]


def read_records(
    file: SourceFile, problems: Problems, *, example: str, columns: Sequence[str] = ()
) -> Iterator[Record]:
    """The records of ``file``, in order; what is no record goes to ``problems``.

    Args:
        file: JSON lines, Parquet, or a folder that `datasets` saved.
        problems: takes lines that are no JSON object.
        example: how a line should look, for their messages.
        columns: fields that are needed; others of Parquet and Arrow files are not read. None given: all.

    Raises:
        DataError: the file cannot be read (any more), or there are enough problems.
    """
    if file.kind == "json lines":
        records = _json_lines(file.path, problems, example)
    else:
        rows = parquet_rows(file.path, columns) if file.kind == "parquet" else dataset_rows(file.path, columns)
        records = (Record(place=f"{file.path}, row {n}", fields=fields) for n, fields in enumerate(rows, start=1))
    for record in records:
        problems.passed()
        yield record


def first_record(file: SourceFile) -> Record | None:
    """The first record of ``file`` that can be read; None if there is none among the first lines."""
    problems = Problems()
    try:
        for record in read_records(file, problems, example="{...}"):
            return record
    except DataError:
        if not problems:
            raise
    return None


def json_kind(value: object) -> str:
    """What a value of JSON is called in a message: "a list"."""
    if value is None:
        return "null"
    kinds = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return kinds.get(type(value), "an object")


def listed(names: Sequence[object]) -> str:
    """Names in quotes for a message."""
    return ", ".join(repr(name) for name in names) or "none"


def text_problem(text: str) -> str | None:
    """Why ``text`` cannot be written as UTF-8, if it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half a surrogate pair at character {error.start}, which is no text; mend or delete the line"
    return None


@contextmanager
def open_text(path: Path, *, newline: str) -> Iterator[Any]:
    """``path`` opened as UTF-8 without its byte order mark; a change since the survey is a DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read any more ({error}); was it changed meanwhile?") from error


def _json_lines(path: Path, problems: Problems, example: str) -> Iterator[Record]:
    with open_text(path, newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.add(
                    f"{place}: not valid JSON ({error}); every line must be one JSON object such as {example}, so put "
                    "each document on a line of its own, or name the file .txt to train on it as plain text"
                )
                continue
            if isinstance(fields, dict):
                yield Record(place=place, fields=fields)
            else:
                problems.add(
                    f"{place}: a JSON object is needed, {json_kind(fields)} was found; write each line as {example}"
                )
