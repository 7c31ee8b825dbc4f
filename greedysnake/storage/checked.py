"""Reads whose bytes are compared with the checksums of their pieces before anyone uses them."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from greedysnake.errors import StorageError
from greedysnake.storage.memory import aligned_empty, as_bytes
from greedysnake.storage.striping import StripedFile
from greedysnake.storage.verify import CommittedPiece, checksum_problem


@dataclass(frozen=True, kw_only=True)
class WrittenExtent:
    """An extent as it was written last.

    Attributes:
        key: its name.
        file: where it is.
        start: its first byte there.
        size: bytes.
        checksums: crc32c of each of its pieces.
    """

    key: str
    file: StripedFile
    start: int
    size: int
    checksums: Sequence[int]

    def pieces(self) -> list[CommittedPiece]:
        """Its pieces, in order."""
        return [
            CommittedPiece(
                key=self.key,
                file=self.file.files[piece.folder],
                offset=piece.offset,
                length=piece.length,
                checksum=checksum,
            )
            for piece, checksum in zip(self.file.pieces(self.start, self.size), self.checksums, strict=True)
        ]


def read_checked(extent: WrittenExtent, into: Tensor, offset: int) -> list[Future[int]]:
    """Start filling ``into`` (uint8) from ``offset`` bytes into an extent; a future a piece.

    A piece of which only a part is wanted is read whole, into memory of its own, as its checksum is of all of it.
    The future of a piece that is not as it was written, or cannot be read, gives a StorageError.
    """
    view, end, start = as_bytes(into), offset + into.numel(), 0
    found = []
    for piece in extent.pieces():
        first, last = max(start, offset), min(start + piece.length, end)
        if first < last:
            target = view[first - offset : last - offset]
            whole = target if last - first == piece.length else as_bytes(aligned_empty(piece.length))
            accept = partial(_accept, piece, whole, target, first - start)
            found.append(piece.file.read([whole], piece.offset, accept=accept))
        start += piece.length
    return found


def _accept(piece: CommittedPiece, whole: memoryview, target: memoryview, skipped: int, value: int) -> None:
    """Let what was read through to ``target`` if its checksum is right; ``skipped`` bytes come before it."""
    if problem := checksum_problem(value, piece):
        damage = piece.damage(problem, readable=True)
        raise StorageError(
            f"{damage}. The disk changed what was written to it: greedysnake verify lists all that is damaged; look at "
            f"the disk's health, and begin again from an export or a copy of the store"
        )
    if whole is not target:
        target[:] = whole[skipped : skipped + len(target)]
