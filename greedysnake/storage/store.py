"""A folder of preallocated files that holds a run's weights and optimizer state.

Durable extents have two slots. Writes go to the slot that is *not* committed, so a commit (flush, then
one rename) copies nothing and a crash or a rollback at any instant leaves the last commit whole.
Scratch extents have one slot and no promise. The store knows bytes by key and nothing of models.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from greedysnake.errors import StorageError
from greedysnake.storage.files import BlockFile, Transfer
from greedysnake.storage.manifest import FILE_NAME, Manifest
from greedysnake.storage.memory import BLOCK_BYTES
from greedysnake.units import format_bytes

IO_THREADS = 4
SLOT_NAMES = ("slot0.bin", "slot1.bin")
SCRATCH_NAME = "scratch.bin"
_OWN_NAMES = frozenset({*SLOT_NAMES, SCRATCH_NAME, "lock", "model"})  # the last: what the owner adds beside them


def store_bytes(durable: Mapping[str, int], scratch: Mapping[str, int]) -> int:
    """Bytes of disk that a store with these extents takes."""
    return 2 * sum(durable.values()) + sum(scratch.values())


class Store:
    """Durable and scratch extents of bytes in one folder.

    Use :meth:`create` for a new store and :meth:`open` to read a committed one. One thread owns a store; while
    it waits, one other may start reads and one other writes. Transfers run on threads of the store's own.

    Attributes:
        folder: where the files are.
        read_bytes, written_bytes: bytes moved since it was opened.
    """

    def __init__(
        self,
        folder: Path,
        lock: int,
        manifest: Manifest,
        scratch: Mapping[str, int],
        *,
        create: bool,
    ) -> None:
        self.folder = folder
        self.read_bytes = 0
        self.written_bytes = 0
        self._lock = lock  # closed by close(), or by whoever made the store if making it fails
        self._commit_error: StorageError | None = None
        self._run = manifest.run
        self._extents = dict(manifest.extents)
        self._committed = dict(zip(self._extents, manifest.slots, strict=True))
        self._current = dict(self._committed)
        self._scratch: dict[str, int] = {}
        self._offsets = _place(self._extents)
        size = sum(self._extents.values())
        # Each direction has its own threads, so that a read never queues behind write-backs.
        self._readers = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="greedysnake-read")
        self._writers = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="greedysnake-write")
        self._files: list[BlockFile] = []
        try:
            for name in SLOT_NAMES:
                self._files.append(self._open(name, size if create else None))
            if create:
                self._open_scratch(scratch)
        except BaseException:
            self._close_files()
            raise

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk that the files take."""
        return store_bytes(self._extents, self._scratch)

    def _open(self, name: str, size: int | None) -> BlockFile:
        return BlockFile(self.folder / name, self._readers, self._writers, size=size)

    def _open_scratch(self, scratch: Mapping[str, int]) -> None:
        offsets = _place(scratch)
        if twice := offsets.keys() & self._extents.keys():
            raise ValueError(f"extents {sorted(twice)} are both durable and scratch")
        self._files.append(self._open(SCRATCH_NAME, sum(scratch.values())))
        self._scratch = dict(scratch)
        self._offsets |= offsets

    def reserve_scratch(self, scratch: Mapping[str, int]) -> None:
        """Replace the scratch extents; what they held is lost.

        Raises:
            StorageError: the disk is too small; the store has no scratch extents then.
        """
        for file in self._files[2:]:
            file.close()
        del self._files[2:]
        (self.folder / SCRATCH_NAME).unlink(missing_ok=True)
        for key in self._scratch:
            del self._offsets[key]
        self._scratch = {}
        _check_free(self.folder, sum(scratch.values()))
        self._open_scratch(scratch)

    @classmethod
    def create(cls, folder: Path, *, run: str, durable: Mapping[str, int], scratch: Mapping[str, int]) -> Self:
        """A new store with all its disk reserved.

        Args:
            folder: made if missing; must not hold a store already.
            run: identity of the run, written to the manifest.
            durable, scratch: bytes by key, multiples of 4096.

        Raises:
            StorageError: the folder is in use, holds another store, cannot be written or is too small.
        """
        new = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"cannot make the storage folder {folder}: {error.strerror}") from error
        lock = _take_lock(folder)
        try:
            foreign = sorted({path.name for path in folder.iterdir()} - _OWN_NAMES)
            if foreign and not (folder / FILE_NAME).exists():
                raise StorageError(
                    f"{folder} holds other files ({', '.join(foreign[:3])}), so it is not used for a store. Choose an "
                    f"empty or a new folder with engine.storage"
                )
            if (folder / FILE_NAME).exists():
                raise StorageError(
                    f"{folder} already holds the store of another run. Choose another folder with engine.storage, "
                    f"or delete this one if its run is not needed any more"
                )
            for stale in (*SLOT_NAMES, SCRATCH_NAME):  # of a run that ended before its first commit
                (folder / stale).unlink(missing_ok=True)
            _check_free(folder, store_bytes(durable, scratch))
            manifest = Manifest(
                run=run,
                extents=list(durable.items()),
                slots=[0] * len(durable),
                contents={},
            )
            return cls(folder, lock, manifest, scratch, create=True)
        except BaseException:
            os.close(lock)
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def open(cls, folder: Path) -> tuple[Self, dict[str, Any]]:
        """A committed store to read from, and the contents given to its last commit.

        Raises:
            StorageError: no committed store there, damaged, or in use.
        """
        if not folder.is_dir():
            raise StorageError(f"{folder} is not a folder, so there is no store to read")
        Manifest.read(folder)  # taking the lock leaves a file, so not in a folder without a store
        lock = _take_lock(folder)
        try:
            manifest = Manifest.read(folder)  # again: its owner may have committed before it let go
            return cls(folder, lock, manifest, {}, create=False), manifest.contents
        except BaseException:
            os.close(lock)
            raise

    def read(self, key: str, into: Tensor, offset: int = 0) -> Transfer:
        """Start filling ``into`` (uint8, page-aligned, whole blocks) from ``offset`` bytes into an extent."""
        file, start = self._locate(key, self._current.get(key, 2))
        self._check_range(key, offset, into.numel())
        self.read_bytes += into.numel()
        return Transfer(file.read(into, start + offset))

    def write(self, key: str, parts: Sequence[Tensor]) -> Transfer:
        """Start writing a whole extent from ``parts`` (uint8, page-aligned, whole blocks), end to end.

        A durable extent is written to its uncommitted slot, and read from there from now on.
        """
        slot = 1 - self._committed[key] if key in self._committed else 2
        file, start = self._locate(key, slot)
        size = self._extents.get(key, self._scratch.get(key, 0))
        count = sum(part.numel() for part in parts)
        if slot != 2:
            self._check_sound()
        if slot != 2 and count != size:
            raise ValueError(f"{key!r} is written whole: it has {size} bytes, got {count}")
        self._check_range(key, 0, count)
        pieces = []
        for part in parts:
            pieces += file.write(part, start)
            start += part.numel()
        self.written_bytes += count
        if slot != 2:
            self._current[key] = slot
        return Transfer(pieces)

    def _locate(self, key: str, slot: int) -> tuple[BlockFile, int]:
        if key not in self._offsets:
            raise ValueError(f"the store has no extent {key!r}")
        return self._files[slot], self._offsets[key]

    def _check_range(self, key: str, offset: int, count: int) -> None:
        size = self._extents.get(key, self._scratch.get(key, 0))
        if offset < 0 or offset + count > size:
            raise ValueError(f"bytes {offset} to {offset + count} are outside extent {key!r} of {size} bytes")

    def _check_sound(self) -> None:
        """Refuse to write once it is not known which slots the manifest on disk names."""
        if self._commit_error is not None:
            raise StorageError(f"{self.folder} takes no more writes, as a commit failed: {self._commit_error}")

    def revert(self, keys: Iterable[str]) -> None:
        """Forget what was written to durable extents since the last commit."""
        keys = list(keys)
        if unknown := [key for key in keys if key not in self._committed]:
            raise ValueError(f"the store has no durable extents {unknown}")
        for key in keys:
            self._current[key] = self._committed[key]

    def commit(self, contents: dict[str, Any]) -> None:
        """Make everything written so far the state that survives a crash; its transfers must have been waited for.

        Args:
            contents: JSON values that :meth:`open` gives back.

        Raises:
            StorageError: the disk cannot be flushed or the manifest not written. One of the two commits, this one
                or the last, stands, and this store takes no more durable writes, which might damage it.
        """
        self._check_sound()
        try:
            for file in self._files[:2]:
                file.sync()
            Manifest(
                run=self._run,
                extents=list(self._extents.items()),
                slots=list(self._current.values()),
                contents=contents,
            ).write(self.folder)
        except StorageError as error:
            self._commit_error = error
            raise
        self._committed = dict(self._current)

    def close(self) -> None:
        """Wait for transfers, close the files and free the folder; what is not committed is lost."""
        self._close_files()
        if self._lock >= 0:
            os.close(self._lock)  # the kernel drops the lock, as it does when a process dies
            self._lock = -1

    def _close_files(self) -> None:
        self._readers.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        for file in self._files:
            file.close()


def _place(extents: Mapping[str, int]) -> dict[str, int]:
    """Offsets of extents laid end to end."""
    offsets, end = {}, 0
    for key, size in extents.items():
        if size < 0 or size % BLOCK_BYTES:
            raise ValueError(f"extent {key!r} has {size} bytes, which is not a multiple of {BLOCK_BYTES}")
        offsets[key] = end
        end += size
    return offsets


def _check_free(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{folder}: the run needs {format_bytes(needed)} of disk ({needed:,} bytes) and "
            f"{format_bytes(free)} is free ({free:,} bytes). Free {format_bytes(needed - free)} there, or "
            f"choose a folder on a larger disk with engine.storage"
        )


def _take_lock(folder: Path) -> int:
    """Lock the folder for this process, until it ends or closes the descriptor."""
    path = folder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"cannot write to the storage folder {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise StorageError(
            f"{folder} is in use by {owner}. Wait for it, stop it, or choose another folder with engine.storage"
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise StorageError(f"cannot lock the storage folder {folder}: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a full disk: only the message to others misses the owner's name then
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
    return descriptor
