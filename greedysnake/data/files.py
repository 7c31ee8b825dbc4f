"""Which text files a corpus has: found in a fixed order, read once, and known by what is in them."""

import codecs
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from greedysnake.errors import DataError

Paths = str | Path | Sequence[str | Path]
"""A file, a folder, or several of either."""

JSON_LINES_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
_BLOCK_BYTES = 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file with text in it."""

    path: Path
    size_bytes: int
    digest: str
    """BLAKE2 of the file's bytes: two files with the same digest hold the same text."""

    @property
    def is_json_lines(self) -> bool:
        """Whether each line is a document of its own; any other file is one document."""
        return self.path.suffix.lower() in JSON_LINES_SUFFIXES


@dataclass(frozen=True, kw_only=True)
class FileSurvey:
    """What was found under the paths given: the files to read, in order, and those passed over."""

    files: tuple[SourceFile, ...]
    not_text: tuple[Path, ...]
    """Files inside a folder that are not UTF-8 text."""
    empty: tuple[Path, ...]
    """Files inside a folder with nothing but white space."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files to read."""
        return sum(file.size_bytes for file in self.files)


def survey_files(paths: Paths) -> FileSurvey:
    """Find and check every text file under ``paths``.

    Files come in the order of ``paths``, a folder's in the order of their names, recursively; hidden files
    and folders are left out, and a file reached twice is taken once. Every file is read through, a block at a
    time.

    Raises:
        DataError: a path does not exist or cannot be read; a file named directly is empty or not UTF-8 text;
            or no text is found at all.
    """
    named = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not named:
        raise DataError("no data paths are given; name at least one text file, JSON lines file or folder of them")
    files: list[SourceFile] = []
    not_text: list[Path] = []
    empty: list[Path] = []
    seen: set[Path] = set()
    for root in named:
        if not root.exists():
            raise DataError(f"{root}: not found; check the path (the current folder is {Path.cwd()})")
        if not root.is_dir() and not root.is_file():
            raise DataError(f"{root}: neither a file nor a folder; name a text file or a folder of them")
        for path in _files_under(root):
            # Resolved, so that a link to a file does not add its text a second time.
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            size_bytes, digest, reason, has_text = _read_through(path)
            if reason is not None:
                if path == root:
                    raise DataError(f"{path}: {reason}; convert it to UTF-8 text, or leave it out of the data paths")
                not_text.append(path)
            elif not has_text:
                if path == root:
                    raise DataError(f"{path}: there is no text in it ({size_bytes} bytes); name a file with text")
                empty.append(path)
            else:
                files.append(SourceFile(path=path, size_bytes=size_bytes, digest=digest))
    if not files:
        raise DataError(
            f"{', '.join(map(str, named))}: no text found ({len(not_text)} files are not UTF-8 text, "
            f"{len(empty)} are empty; hidden files are not read); name a folder with text or JSON lines files"
        )
    if not_text:
        logger.warning(
            "%d of %d files are not UTF-8 text and were skipped, the first is %s",
            len(not_text),
            len(seen),
            not_text[0],
        )
    return FileSurvey(files=tuple(files), not_text=tuple(not_text), empty=tuple(empty))


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


def _files_under(root: Path) -> Iterator[Path]:
    """The file ``root`` itself, or the files of the folder ``root``, sorted, without hidden ones."""
    if root.is_file():
        yield root
        return

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); change its permissions")

    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # The order in which a filesystem lists a folder differs from one machine to the next.
    yield from sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).parts)


def _read_through(path: Path) -> tuple[int, str, str | None, bool]:
    """Size in bytes, digest, the reason why the file is not text (or None), and whether it has any text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    hasher = hashlib.blake2b(digest_size=16)
    size_bytes, has_text = 0, False
    try:
        with path.open("rb") as file:
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
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); change its permissions, or leave it out"
        ) from error
