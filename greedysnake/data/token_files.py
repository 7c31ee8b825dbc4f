"""Token ids of a corpus on disk, where its documents begin, and which tokens are to be learnt."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

_DIGEST_BLOCK_BYTES = 2**24
_TOKENS_AT_ONCE = 2**24
_STARTS, _TARGETS = ".starts", ".targets"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Token ids on disk, all documents one after another, and what is known of them."""

    path: Path
    dtype: str
    """``<u2`` or ``<u4``, as numpy writes it."""
    tokens: int
    documents: int
    largest_token: int
    digest: str
    """BLAKE2 of the bytes of the files."""
    masked: bool = False
    """Whether only some tokens are to be learnt; else all are."""

    def open(self) -> np.ndarray:
        """The ids [tokens], mapped from the file and not read yet."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))

    def starts(self) -> np.ndarray:
        """Where each document begins, and where the last one ends: int64 [documents + 1], mapped from a file."""
        return np.memmap(self.path.with_suffix(_STARTS), dtype="<i8", mode="r", shape=(self.documents + 1,))

    def targets(self) -> "TargetBits | None":
        """Which tokens are to be learnt; None for all."""
        if not self.masked:
            return None
        bits = np.memmap(self.path.with_suffix(_TARGETS), dtype=np.uint8, mode="r", shape=(-(-self.tokens // 8),))
        return TargetBits(bits=bits)


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetBits:
    """A truth value a token, eight in a byte."""

    bits: np.ndarray
    """uint8, the first token in the highest bit."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """The values of tokens ``start`` to ``stop``, bool."""
        first = start // 8
        unpacked = np.unpackbits(self.bits[first : -(-stop // 8)])
        return unpacked[start - 8 * first : stop - 8 * first].astype(bool)

    def count(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Tokens to learn in each stretch, without its first, which nothing in it predicts.

        Args:
            starts, lengths: of stretches that rise and do not overlap, int64 [stretches].
        """
        counts = np.zeros(len(starts), dtype=np.int64)
        ends = starts + lengths
        done = 0
        while done < len(starts):
            base = int(starts[done])
            stop = max(done + 1, int(np.searchsorted(ends, base + _TOKENS_AT_ONCE, side="right")))
            sums = np.concatenate([[0], np.cumsum(self.read(base, int(ends[stop - 1])))])
            part = slice(done, stop)
            seconds = np.minimum(starts[part] + 1, ends[part])
            counts[part] = sums[ends[part] - base] - sums[seconds - base]
            done = stop
        return counts


class TokenWriter:
    """Writes a `TokenFile`, a document at a time; the files appear whole, or not at all.

    Args:
        path: of the ids; the other files lie beside it.
        dtype: of the ids.
        masked: whether only some tokens are to be learnt.
    """

    def __init__(self, path: Path, dtype: np.dtype, *, masked: bool = False) -> None:
        self._path, self._dtype, self._masked = path, dtype, masked
        self._tokens, self._largest, self._documents = 0, -1, 0
        self._suffixes = [path.suffix, _STARTS, *([_TARGETS] if masked else [])]
        self._hashers = {suffix: hashlib.blake2b(digest_size=16) for suffix in self._suffixes}
        self._files: dict[str, BinaryIO] = {}
        self._bits = np.empty(0, dtype=bool)  # fewer than eight, which fill no byte yet

    def __enter__(self) -> Self:
        self._files = {suffix: self._unfinished(suffix).open("wb") for suffix in self._suffixes}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for suffix, file in self._files.items():
            file.close()
            self._unfinished(suffix).unlink(missing_ok=True)  # there only if something went wrong

    def begin_document(self) -> None:
        """What is written from here on is the next document."""
        self._put(_STARTS, np.asarray([self._tokens], dtype="<i8"))
        self._documents += 1

    def write(self, ids: Iterable[int] | np.ndarray, targets: np.ndarray | None = None) -> None:
        """Token ids of the document, and which of them are to be learnt (bool; needed if ``masked``)."""
        block = np.asarray(ids, dtype=self._dtype)
        if not block.size:
            return
        self._largest = max(self._largest, int(block.max()))
        self._tokens += block.size
        self._put(self._path.suffix, block)
        if self._masked:
            if targets is None or len(targets) != block.size:
                raise ValueError(f"{block.size} ids need as many targets")
            bits = np.concatenate([self._bits, targets])
            whole = len(bits) - len(bits) % 8
            self._put(_TARGETS, np.packbits(bits[:whole]))
            self._bits = bits[whole:]

    def finish(self) -> TokenFile:
        """Put the files in their place."""
        self._put(_STARTS, np.asarray([self._tokens], dtype="<i8"))
        if self._masked:
            self._put(_TARGETS, np.packbits(self._bits))
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        written = TokenFile(
            path=self._path,
            dtype=self._dtype.str,
            tokens=self._tokens,
            documents=self._documents,
            largest_token=self._largest,
            digest=_combined([hasher.hexdigest() for hasher in self._hashers.values()]),
            masked=self._masked,
        )
        for suffix in self._suffixes:
            self._unfinished(suffix).replace(self._path.with_suffix(suffix))
        # Last: a description without its tokens could be taken for the description of other ones.
        description = {name: value for name, value in asdict(written).items() if name != "path"}
        self._path.with_suffix(".json").write_text(json.dumps(description) + "\n", encoding="utf-8")
        return written

    def _put(self, suffix: str, values: np.ndarray) -> None:
        self._hashers[suffix].update(values.data)
        self._files[suffix].write(values.data)

    def _unfinished(self, suffix: str) -> Path:
        return self._path.with_suffix(f"{suffix}.unfinished")


def read_token_file(path: Path) -> TokenFile | None:
    """The file written earlier at ``path``, if it is there and its bytes are what was written."""
    try:
        description = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        found = TokenFile(path=path, **description)
        suffixes = [path.suffix, _STARTS, *([_TARGETS] if found.masked else [])]
        digest = _combined([_digest(path.with_suffix(suffix)) for suffix in suffixes])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        logger.warning("%s: its description is damaged; the corpus is tokenised again", path)
        return None
    if digest != found.digest:
        logger.warning("%s: its bytes are not those once written; the corpus is tokenised again", path)
        return None
    return found


def _digest(path: Path) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_DIGEST_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def _combined(digests: list[str]) -> str:
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()
