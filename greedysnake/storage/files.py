"""Preallocated files moved in large aligned blocks past the page cache."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

from greedysnake.errors import StorageError
from greedysnake.storage.checksums import checksum_of
from greedysnake.storage.geometry import STRIPE_BYTES
from greedysnake.storage.memory import BLOCK_BYTES, aligned_empty, as_bytes
from greedysnake.storage.small_files import close
from greedysnake.storage.system import System, reason, uninterrupted

logger = logging.getLogger(__name__)

_NO_RESERVING = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_MOST_VIEWS = 1024  # that one system call takes


class Transfer:
    """Reads or writes under way. Whoever started them waits for them."""

    def __init__(self, pieces: Sequence[Future[Any]]) -> None:
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
        path: the file; a symbolic link is refused.
        readers, writers: threads that carry out the transfers of each direction.
        size: bytes that it has, or that it gets if it is made.
        create: whether to make and preallocate it; it must not be there yet.
        writable: whether an existing file is opened for writing too.
        system: the system calls.

    Raises:
        StorageError: the file cannot be made, opened or preallocated, or has another size.

    Attributes:
        path: the file.
        direct: whether it is moved past the page cache.
    """

    def __init__(
        self,
        path: Path,
        readers: ThreadPoolExecutor,
        writers: ThreadPoolExecutor,
        *,
        size: int,
        create: bool = False,
        writable: bool = False,
        system: System,
    ) -> None:
        self.path = path
        self.direct = True
        self._system = system
        self._readers = readers
        self._writers = writers
        self._again = (os.O_RDWR if create or writable else os.O_RDONLY) | os.O_NOFOLLOW
        self._falling_back = threading.Lock()
        self._descriptors: list[int] = []  # the last is in use; transfers under way may still use the one before
        self._open(os.O_CREAT | os.O_EXCL if create else 0)
        try:
            if not create:
                self._check_size(size)
            if create or writable:
                self._reserve(size)
            if size:  # some file systems accept the flag and refuse the transfer: find out before the first step
                self._read_piece([as_bytes(aligned_empty(BLOCK_BYTES))], 0, False)
        except BaseException:
            self.close()
            raise

    def _open(self, flags: int) -> None:
        try:
            try:
                descriptor = uninterrupted(self._system.open, self.path, self._again | flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._warn()
                # Linux makes the file before it refuses the flag.
                descriptor = uninterrupted(self._system.open, self.path, self._again | (flags & ~os.O_EXCL))
        except OSError as error:
            raise StorageError(f"cannot open {self.path}: {reason(error)}") from error
        self._descriptors.append(descriptor)

    def _warn(self) -> None:
        self.direct = False
        logger.warning(
            "%s: the filesystem refuses direct I/O, so buffered I/O is used: slower, and the page cache "
            "takes memory that host_memory does not count",
            self.path,
        )

    def _leave_direct(self) -> None:
        """Go on with buffered I/O: the disk refuses direct I/O in blocks of 4096 bytes. Raises OSError."""
        with self._falling_back:
            if self.direct:
                self._descriptors.append(uninterrupted(self._system.open, self.path, self._again))
                self._warn()

    def _check_size(self, size: int) -> None:
        try:
            found = uninterrupted(self._system.fstat, self._descriptors[-1]).st_size
        except OSError as error:
            raise StorageError(f"cannot open {self.path}: {reason(error)}") from error
        if found != size:
            raise StorageError(
                f"{self.path} is damaged: it has {found:,} bytes, and the store's manifest says {size:,}. Bring back "
                f"the file as it was, or start again in an empty folder"
            )

    def _reserve(self, size: int) -> None:
        """Have the disk keep room for all of the file: also for what a copy of a store left out as holes."""
        descriptor = self._descriptors[-1]
        try:
            grown = uninterrupted(self._system.fstat, descriptor).st_size != size
            if grown:
                uninterrupted(self._system.ftruncate, descriptor, size)
            try:
                if size:
                    uninterrupted(self._system.posix_fallocate, descriptor, size)
            except OSError as error:
                if error.errno not in _NO_RESERVING:
                    raise
                if grown:
                    self._fill(size)
        except OSError as error:
            raise StorageError(
                f"cannot reserve {size:,} bytes for {self.path}: {reason(error)}. "
                f"Free space there, or choose another folder with engine.storage"
            ) from error

    def _fill(self, size: int) -> None:
        """Reserve by writing zeroes, where the file system has no other way."""
        zeroes = as_bytes(aligned_empty(min(size, STRIPE_BYTES)))
        for start in range(0, size, STRIPE_BYTES):
            self._write_piece([zeroes[: size - start]], start, False)

    def read(
        self,
        into: Sequence[memoryview],
        offset: int,
        *,
        checksum: bool = False,
        accept: Callable[[int], None] | None = None,
    ) -> Future[int]:
        """Start filling page-aligned memory of whole blocks from byte ``offset``.

        Args:
            into: the memory.
            offset: of the first byte.
            checksum: whether the crc32c of what is read is wanted.
            accept: called with it on a reader's thread; what it raises is what the read ends with.

        Returns:
            crc32c of what was read, or 0 where it is not wanted.
        """
        return self._readers.submit(self._read_piece, into, offset, checksum, accept)

    def write(self, parts: Sequence[memoryview], offset: int, *, checksum: bool = False) -> Future[int]:
        """Start writing page-aligned memory of whole blocks at byte ``offset``.

        Returns:
            crc32c of what is written, or 0 without ``checksum``.
        """
        return self._writers.submit(self._write_piece, parts, offset, checksum)

    def _read_piece(
        self,
        views: Sequence[memoryview],
        offset: int,
        checksum: bool,
        accept: Callable[[int], None] | None = None,
    ) -> int:
        self._move("read", self._system.preadv, views, offset)
        value = checksum_of(views) if checksum or accept is not None else 0
        if accept is not None:
            accept(value)
        return value

    def _write_piece(self, views: Sequence[memoryview], offset: int, checksum: bool) -> int:
        value = checksum_of(views) if checksum else 0
        self._move("write", self._system.pwritev, views, offset)
        return value

    def _move(
        self, verb: str, call: Callable[[int, Sequence[memoryview], int], int], views: Sequence[memoryview], offset: int
    ) -> None:
        """All of ``views``; the kernel may move less than asked for at a time."""
        left = sum(len(view) for view in views)
        try:
            while left:
                direct = self.direct
                try:
                    moved = uninterrupted(call, self._descriptors[-1], views[:_MOST_VIEWS], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    self._leave_direct()
                    continue
                if moved == 0:
                    raise StorageError(f"cannot {verb} {self.path} at byte {offset}: the file ends there")
                if direct and moved < left and moved % BLOCK_BYTES:  # direct I/O goes on at whole blocks only
                    moved -= moved % BLOCK_BYTES
                    if moved == 0:
                        self._leave_direct()
                views, offset, left = _after(views, moved), offset + moved, left - moved
        except OSError as error:
            raise StorageError(
                f"cannot {verb} {left:,} bytes at byte {offset} of {self.path}: {reason(error)}"
            ) from error

    def sync(self) -> None:
        """Everything written is on the device when this returns.

        Raises:
            StorageError: it is not known what is. A second try could succeed all the same, as the kernel drops
                what it failed to write, so there must be none.
        """
        try:
            for descriptor in self._descriptors:
                uninterrupted(self._system.fsync, descriptor)
            if not self.direct:
                uninterrupted(self._system.drop_cache, self._descriptors[-1])
        except OSError as error:
            raise StorageError(f"cannot flush {self.path}: {reason(error)}") from error

    def start_sync(self) -> Future[None]:
        """:meth:`sync` on a thread of the folder's own."""
        return self._writers.submit(self.sync)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        while self._descriptors:
            close(self._system, self._descriptors.pop())


def _after(views: Sequence[memoryview], moved: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``moved`` bytes."""
    left = []
    for view in views:
        skipped = min(moved, len(view))
        moved -= skipped
        if skipped < len(view):
            left.append(view[skipped:])
    return left
