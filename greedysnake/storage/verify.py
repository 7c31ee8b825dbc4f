"""What is on disk, read and compared with its checksums."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from greedysnake.errors import StorageError
from greedysnake.storage.files import BlockFile
from greedysnake.storage.memory import aligned_empty, as_bytes

_MEMORY_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class CommittedPiece:
    """A piece of an extent at the last commit."""

    key: str
    file: BlockFile
    offset: int
    length: int
    checksum: int

    def damage(self, reason: str, *, readable: bool) -> "Damage":
        """What to say of it if it is not as it was written."""
        return Damage(
            path=self.file.path,
            offset=self.offset,
            length=self.length,
            key=self.key,
            reason=reason,
            readable=readable,
        )


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Committed bytes that are not as they were written.

    Attributes:
        path: the file.
        offset, length: which bytes of the file.
        key: the extent that they belong to.
        reason: what is wrong with them.
        readable: whether they could be read at all.
    """

    path: Path
    offset: int
    length: int
    key: str
    reason: str
    readable: bool

    def __str__(self) -> str:
        """For people."""
        return f"{self.path}, bytes {self.offset:,} to {self.offset + self.length:,}, part of {self.key}: {self.reason}"


def damages(pieces: Sequence[CommittedPiece], progress: Callable[[int, int], None] | None) -> list[Damage]:
    """Read pieces on their files' own threads, several at once in bounded memory; those that are damaged.

    Args:
        pieces: to read.
        progress: called with bytes read and bytes to read.
    """
    total, done = sum(piece.length for piece in pieces), 0
    largest = max((piece.length for piece in pieces), default=0)
    memory = [aligned_empty(largest) for _ in range(min(len(pieces), max(2, _MEMORY_BYTES // max(largest, 1))))]
    found: list[Damage] = []
    under_way: deque[tuple[CommittedPiece, Tensor, Future[int]]] = deque()
    waiting = deque(pieces)
    try:
        while waiting or under_way:
            while waiting and memory:
                piece, buffer = waiting.popleft(), memory.pop()
                view = as_bytes(buffer)[: piece.length]
                under_way.append((piece, buffer, piece.file.read([view], piece.offset, checksum=True)))
            piece, buffer, future = under_way.popleft()
            reason = _problem(piece, future)
            if reason is not None:
                found.append(piece.damage(reason, readable=future.exception() is None))
            memory.append(buffer)
            done += piece.length
            if progress is not None:
                progress(done, total)
    finally:
        for _, _, future in under_way:  # their memory must stay until they end
            future.exception()
    return found


def _problem(piece: CommittedPiece, future: Future[int]) -> str | None:
    try:
        value = future.result()
    except StorageError as error:
        return str(error)
    return checksum_problem(value, piece)


def checksum_problem(value: int, piece: CommittedPiece) -> str | None:
    """What is wrong with a piece that was read with this crc32c; None: nothing."""
    if value == piece.checksum:
        return None
    return f"its checksum is {value:08x} and was {piece.checksum:08x} when it was written"
