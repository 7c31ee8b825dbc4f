"""The system calls that a store makes, in one place where a test can stand between."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_MORE_WORDS = {
    errno.EROFS: "a file system also turns read-only by itself when its disk fails; the system log says why",
    errno.ESTALE: "the file system was unmounted, or its server lost the folder",
    errno.ENODEV: "the disk is gone",
    errno.ENXIO: "the disk is gone",
    errno.ELOOP: "it is a symbolic link, which a store does not follow",
}


class System:
    """What the store asks of the operating system. Every method is one call, and raises OSError as it does."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor that no child process inherits; what is made is its owner's alone."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        """Give a descriptor back."""
        os.close(descriptor)

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        """At most ``count`` bytes from ``offset``."""
        return os.pread(descriptor, count, offset)

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        """How many bytes of ``content`` were written."""
        return os.pwrite(descriptor, content, offset)

    def preadv(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        """How many bytes of ``into`` were filled."""
        return os.preadv(descriptor, into, offset)

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        """How many bytes of ``parts`` were written."""
        return os.pwritev(descriptor, parts, offset)

    def fsync(self, descriptor: int) -> None:
        """Make what was written to a file or folder last."""
        os.fsync(descriptor)

    def drop_cache(self, descriptor: int) -> None:
        """Let the page cache forget a file."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def ftruncate(self, descriptor: int, size: int) -> None:
        """Set a file's size."""
        os.ftruncate(descriptor, size)

    def posix_fallocate(self, descriptor: int, size: int) -> None:
        """Reserve the first ``size`` bytes of a file on its disk."""
        os.posix_fallocate(descriptor, 0, size)

    def fstat(self, descriptor: int) -> os.stat_result:
        """Status of an open file."""
        return os.fstat(descriptor)

    def stat(self, path: Path) -> os.stat_result:
        """Status of what a path leads to."""
        return os.stat(path)

    def lstat(self, path: Path) -> os.stat_result:
        """Status of a path itself."""
        return os.lstat(path)

    def names(self, folder: Path) -> list[str]:
        """Names in a folder."""
        return os.listdir(folder)

    def mkdir(self, folder: Path) -> None:
        """Make a folder that is its owner's alone."""
        os.mkdir(folder, 0o700)

    def rmdir(self, folder: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(folder)

    def replace(self, source: Path, target: Path) -> None:
        """Give a file another's name, in one instant."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def flock(self, descriptor: int, operation: int) -> None:
        """Lock a file."""
        fcntl.flock(descriptor, operation)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that this user may still write on a folder's file system."""
        return shutil.disk_usage(folder).free


def uninterrupted(call: Callable[_Arguments, _Result], *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
    """The result of a system call, made again when a signal interrupted it."""
    while True:
        try:
            return call(*args, **options)
        except InterruptedError:
            continue


def reason(error: OSError) -> str:
    """Why a system call failed, in words."""
    words = error.strerror or str(error)
    more = _MORE_WORDS.get(error.errno or 0)
    return f"{words} ({more})" if more else words
