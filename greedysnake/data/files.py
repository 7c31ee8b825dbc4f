"""Which files a corpus has: found in a fixed order, read once, and known by what is in them."""

import codecs
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from greedysnake.data.splits import Role, of_role
from greedysnake.data.tables import dataset_row_count, is_saved_dataset, parquet_row_count
from greedysnake.errors import DataError

Paths = str | Path | Sequence[str | Path]
"""A file, a folder, or several of either."""

FileKind = Literal["text", "json lines", "parquet", "dataset"]

JSON_LINES_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet", ".pq"})
_DESCRIPTIONS = frozenset({"dataset_dict.json", "dataset_info.json", "dataset_infos.json"})
"""Files of `datasets` that tell of the data and hold none."""
_TEXT_KINDS = ("text", "json lines")
_BLOCK_BYTES = 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file with text or records in it, or a folder that `datasets` saved, which counts as one."""

    path: Path
    kind: FileKind
    """``text``: one document; the others hold a record a line or row."""
    size_bytes: int
    digest: str
    """BLAKE2 of the bytes: two files with the same digest hold the same text."""
    named: bool
    """Whether the user named this very file, not a folder that it lies in."""


@dataclass(frozen=True, kw_only=True)
class FileSurvey:
    """What was found under the paths given: the files to read, in order, and those passed over."""

    files: tuple[SourceFile, ...]
    not_text: tuple[Path, ...]
    """Files inside a folder that are not UTF-8 text."""
    empty: tuple[Path, ...]
    """Files inside a folder with nothing but white space, or without a row."""
    other_split: tuple[Path, ...] = ()
    """Files inside a folder whose names say that they are for evaluation (or, in evaluation, for training)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files to read."""
        return sum(file.size_bytes for file in self.files)


def survey_files(paths: Paths, role: Role | None = None) -> FileSurvey:
    """Find and check every file of text or records under ``paths``.

    Files come in the order of ``paths``, a folder's in the order of their names, recursively; hidden files
    and folders are left out, and a file reached twice is taken once. Every file is read through, a block at a
    time. Where the names of a folder's record files tell training from evaluation, those for ``role`` are taken.

    Raises:
        DataError: a path does not exist or cannot be read; a file named directly is empty or not UTF-8 text;
            a Parquet file or saved dataset is damaged; or no text is found at all.
    """
    named = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not named:
        raise DataError("no data paths are given; name at least one text file, JSON lines file or folder of them")
    files: list[SourceFile] = []
    not_text: list[Path] = []
    empty: list[Path] = []
    other_split: list[Path] = []
    seen: set[Path] = set()
    for root in named:
        if not root.exists():
            raise DataError(f"{root}: not found; check the path (the current folder is {Path.cwd()})")
        if not root.is_dir() and not root.is_file():
            raise DataError(f"{root}: neither a file nor a folder; name a text file or a folder of them")
        found, others = _of_role(root, list(_files_under(root)), role)
        other_split += others
        for path in found:
            # Resolved, so that a link to a file does not add its text a second time.
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            kind = _kind_of(path)
            size_bytes, digest, reason, has_text = _read_through(path) if kind in _TEXT_KINDS else _table(path, kind)
            if reason is not None:
                if path == root:
                    raise DataError(f"{path}: {reason}; convert it to UTF-8 text, or leave it out of the data paths")
                not_text.append(path)
            elif not has_text:
                if path == root:
                    raise DataError(f"{path}: there is no text in it ({size_bytes} bytes); name a file with text")
                empty.append(path)
            else:
                files.append(SourceFile(path=path, kind=kind, size_bytes=size_bytes, digest=digest, named=path == root))
    if not files:
        raise DataError(
            f"{', '.join(map(str, named))}: no text found ({len(not_text)} files are not UTF-8 text, "
            f"{len(empty)} are empty; hidden files are not read); name a folder with text, JSON lines or Parquet files"
        )
    if not_text:
        logger.warning(
            "%d of %d files are not UTF-8 text and were skipped, the first is %s",
            len(not_text),
            len(seen),
            not_text[0],
        )
    if other_split:
        logger.warning(
            "%d files are, by their names, not for %s and were left out, the first is %s; name files to choose them",
            len(other_split),
            "training" if role == "train" else "evaluation",
            other_split[0],
        )
    return FileSurvey(files=tuple(files), not_text=tuple(not_text), empty=tuple(empty), other_split=tuple(other_split))


def without_files_of(survey: FileSurvey, other: FileSurvey) -> FileSurvey:
    """``survey`` less the files that ``other`` has too, at the same place or as a copy.

    Raises:
        DataError: nothing would be left.
    """
    theirs = {file.digest for file in other.files}
    kept = tuple(file for file in survey.files if file.digest not in theirs)
    left_out = [file.path for file in survey.files if file.digest in theirs]
    if not kept:
        raise DataError(
            f"every training file ({left_out[0]} is the first of {len(left_out)}) is an evaluation file too; "
            "name different files, or give an eval_share instead of evaluation files"
        )
    if left_out:
        logger.warning(
            "%d training files are evaluation files too and were left out of training, the first is %s",
            len(left_out),
            left_out[0],
        )
    return replace(survey, files=kept)


def _kind_of(path: Path) -> FileKind:
    if path.is_dir():
        return "dataset"
    suffix = path.suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    return "json lines" if suffix in JSON_LINES_SUFFIXES else "text"


def _of_role(root: Path, found: list[Path], role: Role | None) -> tuple[list[Path], list[Path]]:
    """The files that serve ``role``, and the others."""
    records = [path for path in found if _kind_of(path) != "text"]
    serve = of_role([path.relative_to(root) for path in records], role)
    others = {path for path, serves in zip(records, serve, strict=True) if not serves}
    return [path for path in found if path not in others], sorted(others)


def _files_under(root: Path) -> Iterator[Path]:
    """``root`` itself, or the files and saved datasets in it, sorted, without hidden ones."""
    if root.is_file() or is_saved_dataset(root):
        yield root
        return

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); change its permissions")

    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        inside = [name for name in subfolders if not name.startswith(".")]
        saved = [name for name in inside if is_saved_dataset(Path(folder, name))]
        subfolders[:] = [name for name in inside if name not in saved]
        files = [name for name in names if not name.startswith(".") and name not in _DESCRIPTIONS]
        found += [path for path in (Path(folder, name) for name in files) if path.is_file()]
        found += [Path(folder, name) for name in saved]
    # The order in which a filesystem lists a folder differs from one machine to the next.
    yield from sorted(found, key=lambda path: path.relative_to(root).parts)


def _table(path: Path, kind: FileKind) -> tuple[int, str, None, bool]:
    """Size in bytes and digest of a table, and whether it has any rows."""
    if kind == "parquet":
        size_bytes, digest = _digest(path)
        return size_bytes, digest, None, parquet_row_count(path) > 0
    hasher, size_bytes = hashlib.blake2b(digest_size=16), 0
    for inner in sorted(file for file in path.rglob("*") if file.is_file()):
        size, digest = _digest(inner)
        size_bytes += size
        hasher.update(f"{inner.relative_to(path)} {digest} ".encode())
    return size_bytes, hasher.hexdigest(), None, dataset_row_count(path) > 0


def _digest(path: Path) -> tuple[int, str]:
    hasher, size_bytes = hashlib.blake2b(digest_size=16), 0
    with _opened(path) as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
            size_bytes += len(block)
    return size_bytes, hasher.hexdigest()


def _read_through(path: Path) -> tuple[int, str, str | None, bool]:
    """Size in bytes, digest, the reason why the file is not text (or None), and whether it has any text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    hasher = hashlib.blake2b(digest_size=16)
    size_bytes, has_text = 0, False
    with _opened(path) as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            undecoded, _ = decoder.getstate()
            if b"\0" in block:
                # Text never has a zero byte; UTF-16 and most binary formats do, early on.
                position = size_bytes + block.index(b"\0")
                return size_bytes, "", f"not text (a zero byte at byte {position})", False
            try:
                has_text |= bool(decoder.decode(block, final=not block).strip())
            except UnicodeDecodeError as error:
                position = size_bytes - len(undecoded) + error.start
                return size_bytes, "", f"not UTF-8 ({error.reason} at byte {position})", False
            if not block:
                return size_bytes, hasher.hexdigest(), None, has_text
            hasher.update(block)
            size_bytes += len(block)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, to be read.

    Raises:
        DataError: it cannot be, now or within.
    """
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); change its permissions, or leave it out"
        ) from error
