"""One logical file in stripes over several folders."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from greedysnake.storage.files import BlockFile
from greedysnake.storage.geometry import Geometry, Piece
from greedysnake.storage.memory import BLOCK_BYTES, as_bytes


class StripedFile:
    """A file of each folder, used as one.

    Attributes:
        files: the files, by number of their folder.

    Args:
        files: opened.
        geometry: which bytes are in which.
    """

    def __init__(self, files: Sequence[BlockFile], geometry: Geometry) -> None:
        self.files = files
        self._geometry = geometry

    def pieces(self, start: int, count: int) -> Iterable[Piece]:
        """The pieces in which bytes are moved and checksummed."""
        return self._geometry.pieces(start, count)

    def read(self, into: Tensor, start: int) -> list[Future[int]]:
        """Start filling ``into`` from byte ``start``; a future a piece. Both have passed :meth:`check`."""
        view = as_bytes(into)
        return [
            self.files[piece.folder].read(
                [view[piece.start - start : piece.start - start + piece.length]], piece.offset
            )
            for piece in self.pieces(start, len(view))
        ]

    def write(self, parts: Sequence[Tensor], start: int, *, checksum: bool) -> list[Future[int]]:
        """Start writing ``parts`` end to end at byte ``start``; a future a piece. All have passed :meth:`check`.

        Its result is the piece's crc32c with ``checksum``.
        """
        views = [as_bytes(part) for part in parts]
        pieces = list(self.pieces(start, sum(len(view) for view in views)))
        return [
            self.files[piece.folder].write(cut, piece.offset, checksum=checksum)
            for piece, cut in zip(pieces, _cut(views, pieces), strict=True)
        ]

    def check(self, parts: Sequence[Tensor], start: int) -> None:
        """Refuse memory and places that are not in whole blocks.

        Raises:
            ValueError: they are not.
        """
        for part in parts:
            if part.dtype != torch.uint8 or not part.is_contiguous():
                raise ValueError(
                    f"{self.files[0].path}: transfer of a {part.dtype} tensor with strides {part.stride()}, "
                    f"not of bytes"
                )
            if start % BLOCK_BYTES or part.numel() % BLOCK_BYTES or part.data_ptr() % BLOCK_BYTES:
                raise ValueError(
                    f"{self.files[0].path}: transfer of {part.numel()} bytes at offset {start} from address "
                    f"{part.data_ptr():#x} is not in whole blocks of {BLOCK_BYTES}"
                )

    def start_sync(self) -> list[Future[None]]:
        """Start making everything written last."""
        return [file.start_sync() for file in self.files]

    def close(self) -> None:
        """Close all files; closing twice does nothing."""
        for file in self.files:
            file.close()


def sync_all(files: Iterable[StripedFile]) -> None:
    """Return when everything written to the files is on their devices.

    Raises:
        StorageError: it may not be.
    """
    flushes = [flush for file in files for flush in file.start_sync()]
    wait(flushes)
    for flush in flushes:
        flush.result()


def _cut(views: Sequence[memoryview], pieces: Iterable[Piece]) -> Iterable[list[memoryview]]:
    """Memory end to end, cut into pieces."""
    waiting = list(reversed(views))
    for piece in pieces:
        wanted, cut = piece.length, []
        while wanted:
            view = waiting.pop()
            cut.append(view[:wanted])
            if len(view) > wanted:
                waiting.append(view[wanted:])
            wanted -= len(cut[-1])
        yield cut
