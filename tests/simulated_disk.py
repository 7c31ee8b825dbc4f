"""A disk in memory whose power can fail: what was not flushed is then there, not there, or there in part.

It promises no more than POSIX does: bytes last when their file was flushed, names when their folder was.
"""

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

from greedysnake.storage import System

SECTOR = 512


class PowerFailure(BaseException):
    """The machine is off: nothing is done any more."""


class Inode:
    """A file: its bytes now, and those that are sure to last."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.lasting = bytearray()
        self.versions: dict[int, list[bytes]] = {}  # of sectors, since the last flush
        self.lost: set[int] = set()  # sectors that a failed flush gave up on

    def write(self, offset: int, content: bytes) -> None:
        end = offset + len(content)
        self.data.extend(bytes(max(0, end - len(self.data))))
        self.data[offset:end] = content
        for sector in range(offset // SECTOR, -(-end // SECTOR)):
            self.versions.setdefault(sector, []).append(bytes(self.data[sector * SECTOR : (sector + 1) * SECTOR]))
            self.lost.discard(sector)

    def flush(self) -> None:
        size = len(self.data)
        self.lasting = self.lasting[:size] + bytearray(max(0, size - len(self.lasting)))
        for sector in self.versions.keys() - self.lost:
            part = self.data[sector * SECTOR : (sector + 1) * SECTOR]
            self.lasting[sector * SECTOR : sector * SECTOR + len(part)] = part
        self.versions = {sector: kept for sector, kept in self.versions.items() if sector in self.lost}

    def after_failure(self, random: Random) -> "Inode":
        """What the next start of the machine finds."""
        found = Inode()
        size = random.choice([len(self.lasting), len(self.data)])
        found.data = self.lasting[:size] + bytearray(max(0, size - len(self.lasting)))
        for sector, versions in self.versions.items():
            part = random.choice([None, *versions])
            if part is not None and sector not in self.lost and sector * SECTOR < size:
                part = part[: size - sector * SECTOR]
                found.data[sector * SECTOR : sector * SECTOR + len(part)] = part
        found.lasting = bytearray(found.data)
        return found


class Folder:
    """Names now, and what was done to them since the folder was flushed."""

    def __init__(self) -> None:
        self.names: dict[str, Inode | Folder] = {}
        self.lasting: dict[str, Inode | Folder] = {}
        self.changes: list[dict[str, Inode | Folder | None]] = []  # each happens whole or not at all

    def change(self, names: "dict[str, Inode | Folder | None]") -> None:
        self.changes.append(names)
        _apply(self.names, names)

    def flush(self) -> None:
        self.lasting, self.changes = dict(self.names), []

    def after_failure(self, random: Random, known: dict[int, Inode]) -> "Folder":
        names = dict(self.lasting)
        for names_changed in self.changes:
            if random.random() < 0.5:
                _apply(names, names_changed)
        found = Folder()
        for name, entry in names.items():
            if isinstance(entry, Folder):
                found.names[name] = entry.after_failure(random, known)
            else:
                found.names[name] = known.setdefault(id(entry), entry.after_failure(random))
        found.flush()
        return found


def _apply(names: "dict[str, Inode | Folder]", changes: "dict[str, Inode | Folder | None]") -> None:
    for name, entry in changes.items():
        if entry is None:
            names.pop(name, None)
        else:
            names[name] = entry


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class SimulatedDisk(System):
    """System calls upon a file system in memory.

    Attributes:
        calls: made so far.
        fail_at: the call, from 0, before which the power fails; None: it does not.
        before: called with the name of every call before it is carried out.

    Args:
        root: of the file system.
        block: direct I/O must be in whole blocks of this many bytes.
    """

    def __init__(self, root: Folder | None = None, *, block: int = 4096) -> None:
        self.calls = 0
        self.fail_at: int | None = None
        self.before: Callable[[str, str], None] | None = None
        self._root = root or Folder()
        self._block = block
        self._open: dict[int, tuple[Inode | Folder, int, str]] = {}
        self._locks: dict[int, int] = {}
        self._next = 1000
        self._mutex = threading.RLock()

    def after_failure(self, random: Random) -> "SimulatedDisk":
        """The disk as the next start of the machine finds it."""
        return SimulatedDisk(self._root.after_failure(random, {}), block=self._block)

    def after_kill(self) -> "SimulatedDisk":
        """The disk as another process finds it when this one is gone: all is there, and no more of it lasts."""
        return SimulatedDisk(self._root, block=self._block)

    def _enter(self, name: str, where: "Path | int") -> None:
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise PowerFailure
        self.calls += 1
        if self.before is not None:
            self.before(name, self._open[where][2] if isinstance(where, int) else str(where))

    def _at(self, path: Path) -> "Inode | Folder":
        entry: Inode | Folder = self._root
        for part in path.parts[1:]:
            if not isinstance(entry, Folder):
                raise _error(errno.ENOTDIR)
            if part not in entry.names:
                raise _error(errno.ENOENT)
            entry = entry.names[part]
        return entry

    def _folder(self, path: Path) -> Folder:
        entry = self._at(path)
        if not isinstance(entry, Folder):
            raise _error(errno.ENOTDIR)
        return entry

    def open(self, path: Path, flags: int) -> int:
        with self._mutex:
            self._enter("open", path)
            folder = self._folder(path.parent) if path != path.parent else self._root
            if path != path.parent and path.name not in folder.names:
                if not flags & os.O_CREAT:
                    raise _error(errno.ENOENT)
                folder.change({path.name: Inode()})
            elif flags & os.O_EXCL:
                raise _error(errno.EEXIST)
            self._next += 1
            self._open[self._next] = (self._at(path), flags, str(path))
            return self._next

    def close(self, descriptor: int) -> None:
        with self._mutex:
            path = self._open.pop(descriptor)[2]
            self._locks = {inode: owner for inode, owner in self._locks.items() if owner != descriptor}
            if self.before is not None:  # a close that fails has closed all the same
                self.before("close", path)

    def _file(self, descriptor: int, offset: int = 0, sizes: Sequence[int] = ()) -> Inode:
        entry, flags, _ = self._open[descriptor]
        if not isinstance(entry, Inode):
            raise _error(errno.EISDIR)
        if flags & os.O_DIRECT and any(number % self._block for number in (offset, *sizes)):
            raise _error(errno.EINVAL)
        return entry

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        with self._mutex:
            self._enter("pread", descriptor)
            return bytes(self._file(descriptor).data[offset : offset + count])

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        with self._mutex:
            self._enter("pwrite", descriptor)
            self._file(descriptor).write(offset, content)
            return len(content)

    def preadv(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        with self._mutex:
            self._enter("preadv", descriptor)
            file = self._file(descriptor, offset, [len(view) for view in into])
            start = offset
            for view in into:
                part = file.data[offset : offset + len(view)]
                view[: len(part)] = part
                offset += len(part)
            return offset - start

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        with self._mutex:
            self._enter("pwritev", descriptor)
            file = self._file(descriptor, offset, [len(part) for part in parts])
            for part in parts:
                file.write(offset, bytes(part))
                offset += len(part)
            return sum(len(part) for part in parts)

    def fsync(self, descriptor: int) -> None:
        with self._mutex:
            self._enter("fsync", descriptor)
            self._open[descriptor][0].flush()

    def fail_flush(self, path: Path) -> None:
        """As the kernel does when it cannot write back: what was not flushed is clean now, and lost."""
        file = self._at(path)
        assert isinstance(file, Inode)
        file.lost |= file.versions.keys()

    def drop_cache(self, descriptor: int) -> None:
        pass

    def ftruncate(self, descriptor: int, size: int) -> None:
        with self._mutex:
            self._enter("ftruncate", descriptor)
            data = self._file(descriptor).data
            del data[size:]
            data.extend(bytes(size - len(data)))

    def posix_fallocate(self, descriptor: int, size: int) -> None:
        with self._mutex:
            self._enter("posix_fallocate", descriptor)
            data = self._file(descriptor).data
            data.extend(bytes(max(0, size - len(data))))

    def _status(self, entry: "Inode | Folder") -> SimpleNamespace:
        size = len(entry.data) if isinstance(entry, Inode) else 0
        mode = stat.S_IFREG | 0o600 if isinstance(entry, Inode) else stat.S_IFDIR | 0o700
        return SimpleNamespace(st_dev=1, st_ino=id(entry), st_mode=mode, st_size=size)

    def fstat(self, descriptor: int):  # type: ignore[override]
        with self._mutex:
            self._enter("fstat", descriptor)
            return self._status(self._open[descriptor][0])

    def stat(self, path: Path):  # type: ignore[override]
        with self._mutex:
            self._enter("stat", path)
            return self._status(self._at(path))

    def lstat(self, path: Path):  # type: ignore[override]
        return self.stat(path)

    def names(self, folder: Path) -> list[str]:
        with self._mutex:
            self._enter("names", folder)
            return list(self._folder(folder).names)

    def mkdir(self, folder: Path) -> None:
        with self._mutex:
            self._enter("mkdir", folder)
            parent = self._folder(folder.parent)
            if folder.name in parent.names:
                raise _error(errno.EEXIST)
            parent.change({folder.name: Folder()})

    def rmdir(self, folder: Path) -> None:
        with self._mutex:
            self._enter("rmdir", folder)
            if self._folder(folder).names:
                raise _error(errno.ENOTEMPTY)
            self._folder(folder.parent).change({folder.name: None})

    def replace(self, source: Path, target: Path) -> None:
        with self._mutex:
            self._enter("replace", source)
            assert source.parent == target.parent
            folder = self._folder(source.parent)
            folder.change({source.name: None, target.name: self._at(source)})

    def unlink(self, path: Path) -> None:
        with self._mutex:
            self._enter("unlink", path)
            if isinstance(self._at(path), Folder):
                raise _error(errno.EISDIR)
            self._folder(path.parent).change({path.name: None})

    def flock(self, descriptor: int, operation: int) -> None:
        with self._mutex:
            self._enter("flock", descriptor)
            assert operation == fcntl.LOCK_EX | fcntl.LOCK_NB
            owner = self._locks.setdefault(id(self._open[descriptor][0]), descriptor)
            if owner != descriptor:
                raise _error(errno.EWOULDBLOCK)

    def free_bytes(self, folder: Path) -> int:
        return 2**40
