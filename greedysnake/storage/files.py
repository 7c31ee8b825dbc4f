"""Preallocated files moved in large aligned blocks past the page cache."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from greedysnake.errors import StorageError
from greedysnake.storage.memory import BLOCK_BYTES, aligned_empty

logger = logging.getLogger(__name__)

TRANSFER_BYTES = 8 * 2**20
"""Largest piece moved by one system call: large enough for full disk rate, small enough to spread over threads."""


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


class Transfer:
    """Reads or writes under way. Whoever started them waits for them."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    @classmethod
    def together(cls, transfers: Iterable["Transfer"]) -> Self:
        """Several transfers as one."""
        return cls([piece for transfer in transfers for piece in transfer._pieces])

    def wait(self) -> None:
        """Return when every piece has been moved; the memory is free for other use then, also after an error.

        Raises:
            StorageError: a piece could not be moved.
        """
        wait(self._pieces)
        for piece in self._pieces:
            piece.result()

    def when_done(self, call: Callable[[BaseException | None], None]) -> None:
        """Have ``call`` called once, when every piece has been moved or failed: with None or the first error.

        It is called on the thread that moved the last piece, or at once if all have been moved already.
        """
        left, first, lock = len(self._pieces), None, threading.Lock()

        def one_less(piece: Future[None]) -> None:
            nonlocal left, first
            with lock:
                first = first or piece.exception()
                left -= 1
                last = left == 0
            if last:
                call(first)

        if not self._pieces:
            call(None)
        for piece in self._pieces:
            piece.add_done_callback(one_less)


class BlockFile:
    """One preallocated file, read and written by byte ranges in whole blocks.

    Args:
        path: the file.
        readers, writers: threads that carry out the transfers of each direction.
        size: bytes to create and preallocate it with, or None to open an existing file for reading.

    Raises:
        StorageError: the file cannot be made, opened or preallocated.
    """

    def __init__(
        self, path: Path, readers: ThreadPoolExecutor, writers: ThreadPoolExecutor, *, size: int | None
    ) -> None:
        self.path = path
        self._readers = readers
        self._writers = writers
        self._fd = -1
        flags = os.O_RDONLY if size is None else os.O_RDWR | os.O_CREAT
        self.direct = True
        try:
            try:
                self._fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fall_back(flags)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        try:
            if size is not None:
                self._preallocate(size)
            if self.direct:
                self._try_direct(flags)
        except BaseException:
            self.close()
            raise

    def _fall_back(self, flags: int) -> None:
        self.direct = False
        self._fd = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        logger.warning(
            "%s: the filesystem refuses direct I/O, so buffered I/O is used: slower, and the page cache "
            "takes memory that host_memory does not count",
            self.path,
        )

    def _preallocate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
            if size:
                os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise StorageError(
                f"cannot reserve {size:,} bytes for {self.path}: {error.strerror}. "
                f"Free space there, or choose another folder with engine.storage"
            ) from error

    def _try_direct(self, flags: int) -> None:
        """Some filesystems accept the flag and refuse the transfer: find out before the first step."""
        try:
            os.preadv(self._fd, [as_bytes(aligned_empty(BLOCK_BYTES))], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
            self.close()
            try:
                self._fall_back(flags)
            except OSError as second:
                raise StorageError(f"cannot open {self.path}: {second.strerror}") from second

    def read(self, into: Tensor, offset: int) -> list[Future[None]]:
        """Fill ``into`` (uint8, contiguous) from byte ``offset``; one future for each piece."""
        return self._submit(self._readers, self._read_piece, into, offset)

    def write(self, data: Tensor, offset: int) -> list[Future[None]]:
        """Write ``data`` (uint8, contiguous) at byte ``offset``; one future for each piece."""
        return self._submit(self._writers, self._write_piece, data, offset)

    def _submit(
        self, pool: ThreadPoolExecutor, move: Callable[[memoryview, int], None], data: Tensor, offset: int
    ) -> list[Future[None]]:
        if data.dtype != torch.uint8 or not data.is_contiguous():
            raise ValueError(
                f"{self.path}: transfer of a {data.dtype} tensor with strides {data.stride()}, not of bytes"
            )
        count = data.numel()
        if offset % BLOCK_BYTES or count % BLOCK_BYTES or data.data_ptr() % BLOCK_BYTES:
            raise ValueError(
                f"{self.path}: transfer of {count} bytes at offset {offset} from address {data.data_ptr():#x} "
                f"is not in whole blocks of {BLOCK_BYTES}"
            )
        view = as_bytes(data)
        return [
            pool.submit(move, view[start : start + TRANSFER_BYTES], offset + start)
            for start in range(0, count, TRANSFER_BYTES)
        ]

    def _read_piece(self, view: memoryview, offset: int) -> None:
        self._move("read", os.preadv, view, offset)

    def _write_piece(self, view: memoryview, offset: int) -> None:
        self._move("write", os.pwritev, view, offset)

    def _move(
        self, verb: str, call: Callable[[int, list[memoryview], int], int], view: memoryview, offset: int
    ) -> None:
        """All of ``view``; the kernel may move less than asked for at a time."""
        try:
            while view:
                moved = call(self._fd, [view], offset)
                if moved == 0:
                    raise StorageError(f"cannot {verb} {self.path} at byte {offset}: the file ends there")
                view, offset = view[moved:], offset + moved
        except OSError as error:
            raise StorageError(
                f"cannot {verb} {len(view):,} bytes at byte {offset} of {self.path}: {error.strerror}"
            ) from error

    def sync(self) -> None:
        """Everything written is on the device when this returns."""
        try:
            os.fsync(self._fd)
            if not self.direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StorageError(f"cannot flush {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
