"""Locks of folders, so that no two runs ever share one."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from greedysnake.errors import StorageError, StorageInUseError
from greedysnake.storage.names import LOCK_NAME
from greedysnake.storage.small_files import close, write_all
from greedysnake.storage.system import System, reason, uninterrupted


class FolderLock:
    """A folder held for this process. The kernel lets go of it when the process ends, however it ends.

    Args:
        folder: to lock; a small file stays in it.
        writable: whether the folder will be written to; if not, a read-only file system will do.
        system: the system calls.

    Raises:
        StorageError: another process holds the folder, or it cannot be locked.
    """

    def __init__(self, folder: Path, *, writable: bool, system: System) -> None:
        self._system = system
        path = folder / LOCK_NAME
        while True:
            self._descriptor = self._open(folder, path, writable)
            try:
                self._lock(folder)
                if self._is_current(path):  # else its last holder removed the file while this process opened it
                    break
            except BaseException:
                self.release()
                raise
            self.release()
        with contextlib.suppress(OSError):  # a full disk: only the message to others misses the owner's name then
            uninterrupted(system.ftruncate, self._descriptor, 0)
            write_all(system, self._descriptor, f"process {os.getpid()}\n".encode())

    def _open(self, folder: Path, path: Path, writable: bool) -> int:
        try:
            try:
                return uninterrupted(self._system.open, path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            except OSError as error:
                if writable or error.errno != errno.EROFS:
                    raise
                return uninterrupted(self._system.open, path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise StorageError(f"cannot write to the storage folder {folder}: {reason(error)}") from error

    def _lock(self, folder: Path) -> None:
        try:
            uninterrupted(self._system.flock, self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageInUseError(
                f"{folder} is in use by {self._owner()}. Wait for it, stop it, or choose another folder "
                f"with engine.storage"
            ) from error
        except OSError as error:
            raise StorageError(f"cannot lock the storage folder {folder}: {reason(error)}") from error

    def _owner(self) -> str:
        try:
            told = uninterrupted(self._system.pread, self._descriptor, 100, 0)
        except OSError:
            told = b""
        return told.decode(errors="replace").strip() or "another process"

    def _is_current(self, path: Path) -> bool:
        try:
            there, own = uninterrupted(self._system.stat, path), uninterrupted(self._system.fstat, self._descriptor)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StorageError(f"cannot lock the storage folder {path.parent}: {reason(error)}") from error
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    def release(self) -> None:
        """Let go of the folder; doing so twice does nothing."""
        if self._descriptor >= 0:
            close(self._system, self._descriptor)
            self._descriptor = -1
