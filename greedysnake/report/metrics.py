"""Numbers of a run on disk: a line of JSON per step, and whole JSON files that are never half written."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greedysnake.closing import Closing
from greedysnake.errors import GreedySnakeError


class MetricsFile(Closing):
    """Append-only ``metrics.jsonl``: one JSON object per line, on the disk before the next one.

    A process that dies, or a power cut, leaves every line written so far; at worst the last line is torn, and
    opening the file again mends that, so that new lines never continue a torn one.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists():
            _mend_last_line(self.path)
        self._file = self.path.open("ab")
        _sync_folder(self.path.parent)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record`` as one line; NaN and infinities become null.

        Raises:
            TypeError: a value is none of JSON's types; nothing is written.
            OSError: the line could not be written.
        """
        self._file.write(_to_json(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # a fraction of a millisecond: no snapshot then has more steps than this file

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every whole line of a metrics file, in file order; a torn last line is left out.

    Raises:
        FileNotFoundError: there is no such file.
        GreedySnakeError: a line that is not the last one is no JSON object.
    """
    lines = Path(path).read_bytes().split(b"\n")
    last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=0)
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse_record(line)
        if record is not None:
            records.append(record)
        elif number != last:
            raise GreedySnakeError(f"{path}: line {number} is no JSON object; delete that line to go on")
    return records


def metrics_until(path: str | os.PathLike[str], last_step: int) -> list[dict[str, Any]]:
    """The lines of a metrics file up to those of ``last_step``; none if there is no file.

    Raises:
        GreedySnakeError: as for `read_metrics`.
    """
    if not Path(path).exists():
        return []
    return [record for record in read_metrics(path) if record.get("step", 0) <= last_step]


def cut_metrics(path: str | os.PathLike[str], last_step: int) -> list[dict[str, Any]]:
    """Take the lines of steps after ``last_step`` out of a metrics file, and give those that stay.

    A run that died may have written lines of steps that its last snapshot does not hold; resumed, it makes these
    steps again. Readers see the old file or the new, never a part.

    Raises:
        GreedySnakeError: as for `read_metrics`.
        OSError: the folder cannot be written; the old file stays.
    """
    kept = metrics_until(path, last_step)
    if Path(path).exists():
        write_text_atomic(Path(path), "".join(f"{_to_json(record)}\n" for record in kept))
    return kept


def write_json_atomic(path: str | os.PathLike[str], obj: Any, *, indent: int | None = 2) -> None:
    """Replace the file at ``path`` by ``obj`` as JSON; readers see the old file or the new, never a part.

    NaN and infinities become null.

    Raises:
        TypeError: a value is none of JSON's types; the old file stays.
        OSError: the folder cannot be written; the old file stays.
    """
    write_text_atomic(Path(path), _to_json(obj, indent=indent) + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Replace the file at ``path``; a reader, or a power cut, finds the old file or the new, never a part.

    Raises:
        OSError: the folder cannot be written; the old file stays.
    """
    # Not tempfile: its files are private to the user, and the renamed file would be, too.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _to_json(obj: Any, *, indent: int | None = None) -> str:
    return json.dumps(_without_non_finite(obj), indent=indent, ensure_ascii=False, allow_nan=False)


def _without_non_finite(obj: Any) -> Any:
    """A copy of ``obj`` with None for NaN and infinities, which JSON does not have."""
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {key: _without_non_finite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_without_non_finite(value) for value in obj]
    return obj


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # bad JSON, or bytes that are no UTF-8
        return None
    return record if isinstance(record, dict) else None


def _mend_last_line(path: Path) -> None:
    """Make the file end with a line break: cut a torn last line off, or end one that only lacks its break."""
    with path.open("r+b") as file:
        content = file.read()
        tail = content[content.rfind(b"\n") + 1 :]
        if not tail:
            return
        if _parse_record(tail) is not None:
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(tail))


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` last through a power failure, where the system lets one sync a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
