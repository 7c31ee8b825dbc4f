"""What a store asks of the disk, written down as it happens, so that a power cut at any moment can be played back."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from greedysnake.storage import System


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One change that was asked of the disk.

    Attributes:
        kind: ``create``, ``write``, ``truncate``, ``reserve``, ``flush``, ``rename``, ``unlink``, ``mkdir``, ``rmdir``.
        path: of the file or folder; of a rename, the name before.
        file: which file, whatever its name is by then; None for a folder.
        target: of a rename.
        offset, data: what is written where.
        size: of a truncate or reserve.
    """

    kind: str
    path: Path
    file: int | None = None
    target: Path | None = None
    offset: int = 0
    data: bytes = field(default=b"", repr=False)
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        phase: ``begin`` or ``end`` of an operation; ``commit`` or ``committed`` for what the store's owner saw.
        operation: of ``begin`` and ``end``.
        steps: of the others: the step whose state is committed.
    """

    phase: str
    operation: Operation | None = None
    steps: int | None = None


class RecordingSystem(System):
    """The real system calls, written down.

    An operation has a beginning and an end of its own, and other threads' fall in between, because a flush covers only
    what had ended before it began. Files that others put into a folder of the store are written down when the store
    first looks at them, as made and not flushed.

    Attributes:
        base: the folder that holds everything.
        before: files that were there at the beginning, by number; their content has long been flushed.
        events: in order.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.events: list[Event] = []
        self._lock = threading.RLock()
        self._numbers: dict[Path, int] = {}
        self._folders = {base}
        self._open: dict[int, tuple[Path, int | None]] = {}
        self._next = count()
        self.before: dict[int, tuple[Path, bytes]] = {}
        for path in sorted(base.rglob("*")):
            if path.is_dir():
                self._folders.add(path)
            else:
                self.before[self._number(path)] = (path, path.read_bytes())
        self.folders_before = sorted(self._folders)

    def mark(self, phase: str, steps: int) -> None:
        """Write down what the store's owner saw."""
        with self._lock:
            self.events.append(Event(phase=phase, steps=steps))

    def _number(self, path: Path) -> int:
        """A new file's number, which becomes its path's."""
        self._numbers[path] = next(self._next)
        return self._numbers[path]

    @contextmanager
    def _recorded(self, operation: Operation) -> Iterator[None]:
        begin = Event(phase="begin", operation=operation)
        with self._lock:
            self.events.append(begin)
        try:
            yield
        except BaseException:
            with self._lock:
                self.events.remove(begin)
            raise
        with self._lock:
            self.events.append(Event(phase="end", operation=operation))

    def _seen(self, path: Path) -> None:
        """Write down what somebody else has made; what holds the base was there long before."""
        if path in self._numbers or path in self._folders or path in self.base.parents or not path.exists():
            return
        if path.is_dir():
            with self._recorded(Operation(kind="mkdir", path=path)):
                self._folders.add(path)
            return
        number = self._number(path)
        with self._recorded(Operation(kind="create", path=path, file=number)):
            pass
        with self._recorded(Operation(kind="write", path=path, file=number, data=path.read_bytes())):
            pass

    def open(self, path: Path, flags: int) -> int:
        with self._lock:
            if path.exists() or not flags & os.O_CREAT:
                self._seen(path)
                descriptor = super().open(path, flags)
            else:
                with self._recorded(Operation(kind="create", path=path, file=self._number(path))):
                    descriptor = super().open(path, flags)
            self._open[descriptor] = path, self._numbers.get(path)
            return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            super().close(descriptor)
            del self._open[descriptor]

    def _operation(self, kind: str, descriptor: int, **values: object) -> Operation:
        path, number = self._open[descriptor]
        return Operation(kind=kind, path=path, file=number, **values)  # type: ignore[arg-type]

    def pwrite(self, descriptor: int, content: bytes, offset: int) -> int:
        with self._recorded(self._operation("write", descriptor, data=bytes(content), offset=offset)):
            written = super().pwrite(descriptor, content, offset)
            assert written == len(content)
            return written

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        with self._recorded(self._operation("write", descriptor, data=b"".join(parts), offset=offset)):
            written = super().pwritev(descriptor, parts, offset)
            assert written == sum(len(part) for part in parts)
            return written

    def fsync(self, descriptor: int) -> None:
        if self._open[descriptor][0] in self.base.parents:  # nothing in there is lost
            super().fsync(descriptor)
            return
        with self._recorded(self._operation("flush", descriptor)):
            super().fsync(descriptor)

    def ftruncate(self, descriptor: int, size: int) -> None:
        with self._recorded(self._operation("truncate", descriptor, size=size)):
            super().ftruncate(descriptor, size)

    def posix_fallocate(self, descriptor: int, size: int) -> None:
        with self._recorded(self._operation("reserve", descriptor, size=size)):
            super().posix_fallocate(descriptor, size)

    def lstat(self, path: Path) -> os.stat_result:
        self._seen(path)
        return super().lstat(path)

    def mkdir(self, folder: Path) -> None:
        with self._recorded(Operation(kind="mkdir", path=folder)):
            super().mkdir(folder)
            self._folders.add(folder)

    def rmdir(self, folder: Path) -> None:
        with self._recorded(Operation(kind="rmdir", path=folder)):
            super().rmdir(folder)
            self._folders.remove(folder)

    def replace(self, source: Path, target: Path) -> None:
        operation = Operation(kind="rename", path=source, file=self._numbers[source], target=target)
        with self._lock, self._recorded(operation):
            super().replace(source, target)
            self._numbers[target] = self._numbers.pop(source)

    def unlink(self, path: Path) -> None:
        self._seen(path)
        with self._lock, self._recorded(Operation(kind="unlink", path=path, file=self._numbers.get(path))):
            super().unlink(path)
            del self._numbers[path]
