"""Which fault meets which operation, and what must come of it: the list behind test_fault_matrix.py.

python tests/fault_matrix.py      # the table of docs/reliability.md
"""

import errno
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from faulty_system import FaultySystem

HARMLESS = ("EINTR", "short", "slow")
"""Faults that change nothing: a call that a signal interrupts, that moves less than asked for, that takes its time."""

READING = ("EIO", "ESTALE")
WRITING = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE")
OPENING = ("EIO", "EROFS", "EACCES", "ENOENT", "ESTALE")
NAMING = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "ENOENT", "ESTALE")

HEADINGS = {
    "EINTR": "interrupted",
    "short": "moved in part",
    "slow": "slow disk",
    "EIO": "I/O error",
    "ENOSPC": "disk full",
    "EDQUOT": "quota used up",
    "EROFS": "read-only",
    "EACCES": "no permission",
    "ENOENT": "folder gone",
    "ESTALE": "server lost it",
}
"""Every fault, in words."""

CHANGING = frozenset({"pwrite", "pwritev", "fsync", "ftruncate", "posix_fallocate", "mkdir", "replace"})
"""Calls that change a disk, besides opening a file for writing."""

TRANSFERS = frozenset({"pread", "preadv", "pwrite", "pwritev"})

TIMES = {"new": "a new run", "step": "a step", "resume": "a run that goes on"}

MARKS = {"goes on": "·", "new": "N", "step": "S", "resume": "R", None: ""}
"""How the table shows what comes of a fault."""

LARGEST_SMALL = 8192
"""Bytes of a chunk's weights in the matrix's run, more than a boundary and less than a gradient and the state have."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A kind of call at a time of a run.

    Attributes:
        when: in a ``new`` run before its first step, in a ``step``, or in a ``resume``.
        name: what is being done.
        call: the system call.
        path: part of the path that it is upon, or the end of it if it is a folder's.
        faults: errors that it can give.
        says: what the message calls it.
        small: whether it moves at most LARGEST_SMALL bytes; None: any number.
    """

    when: str
    name: str
    call: str
    path: str
    faults: tuple[str, ...]
    says: str
    small: bool | None = None

    def matches(self, call: str, path: str, count: int) -> bool:
        """Whether a call is of this kind."""
        here = path.endswith(self.path) if self.path.endswith("/") else self.path in path
        return call == self.call and here and self.small in (None, count <= LARGEST_SMALL)

    @property
    def harmless(self) -> tuple[str, ...]:
        """Faults that it takes without anybody noticing."""
        return HARMLESS if self.call in TRANSFERS else ("EINTR", "slow")

    def outcome(self, fault: str) -> str | None:
        """What comes of a fault: the run goes on, or an error at that time; None: the call does not give it."""
        if fault in HARMLESS:
            return "goes on" if fault in self.harmless else None
        return self.when if fault in self.faults else None


_ROWS: list[tuple[str, str, str, str, tuple[str, ...], str, bool | None]] = [
    ("new", "make the storage folder", "mkdir", "store", NAMING, "cannot make the storage folder", None),
    ("new", "open the lock", "open", "lock", NAMING, "cannot write to the storage folder", None),
    ("new", "take the lock", "flock", "lock", READING, "cannot lock the storage folder", None),
    ("new", "make weights and state", "open", "slot", NAMING, "cannot open", None),
    ("new", "preallocate weights and state", "posix_fallocate", "slot", WRITING, "cannot reserve", None),
    ("new", "preallocate scratch", "posix_fallocate", "scratch", WRITING, "cannot reserve", None),
    ("new", "write weights and state", "pwritev", "slot", WRITING, "cannot write", None),
    ("new", "flush the model's files", "fsync", "model", WRITING, "cannot flush", None),
    ("new", "flush weights and state", "fsync", "slot", WRITING, "cannot flush", None),
    ("new", "rename the manifest", "replace", ".manifest", NAMING, "cannot write", None),
    ("step", "read weights", "preadv", "slot", READING, "cannot read", True),
    ("step", "read state", "preadv", "slot", READING, "cannot read", False),
    ("step", "write weights", "pwritev", "slot", WRITING, "cannot write", True),
    ("step", "write state", "pwritev", "slot", WRITING, "cannot write", False),
    ("step", "write boundaries", "pwritev", "scratch", WRITING, "cannot write", True),
    ("step", "read boundaries", "preadv", "scratch", READING, "cannot read", True),
    ("step", "write gradients", "pwritev", "scratch", WRITING, "cannot write", False),
    ("step", "read gradients", "preadv", "scratch", READING, "cannot read", False),
    ("step", "flush weights and state", "fsync", "slot", WRITING, "cannot flush", None),
    ("step", "make the manifest", "open", ".manifest", NAMING, "cannot write", None),
    ("step", "write the manifest", "pwrite", ".manifest", WRITING, "cannot write", None),
    ("step", "flush the manifest", "fsync", ".manifest", WRITING, "cannot write", None),
    ("step", "rename the manifest", "replace", ".manifest", NAMING, "cannot write", None),
    ("step", "flush the folder", "fsync", "store/", WRITING, "cannot write", None),
    ("resume", "open the manifest", "open", "/manifest", OPENING, "manifest.json", None),
    ("resume", "read the manifest", "pread", "/manifest", READING, "cannot read", None),
    ("resume", "open the lock", "open", "lock", NAMING, "cannot write to the storage folder", None),
    ("resume", "open weights and state", "open", "slot", OPENING, "cannot open", None),
    ("resume", "check weights and state", "preadv", "slot", READING, "cannot read", False),
    ("resume", "rename the manifest", "replace", ".manifest", NAMING, "cannot write", None),
    ("resume", "make scratch", "open", "scratch", NAMING, "cannot open", None),
    ("resume", "preallocate scratch", "posix_fallocate", "scratch", WRITING, "cannot reserve", None),
]

OPERATIONS = [
    Operation(when=when, name=name, call=call, path=path, faults=faults, says=says, small=small)
    for when, name, call, path, faults, says, small in _ROWS
]

CELLS = [(operation, fault) for operation in OPERATIONS for fault in operation.faults]


class StruckSystem(FaultySystem):
    """The real system calls, all of which meet a harmless fault, or one of which fails.

    Attributes:
        when: what the run is doing now, as in :class:`Operation`.
        counts: calls of each operation since it was last cleared.

    Args:
        harmless: the fault that every call meets that can.
    """

    def __init__(self, harmless: str | None = None) -> None:
        super().__init__()
        self.when = "new"
        self.counts: Counter[Operation] = Counter()
        self._harmless = harmless
        self._target: tuple[Operation, int, str] | None = None
        self._spreads = False
        self._guard = threading.Lock()
        self._own = threading.local()

    def strike_at(self, operation: Operation, at: int, fault: str) -> None:
        """Have the call ``at``, from 1, of an operation fail, and with it whatever the reason concerns."""
        self.counts.clear()
        self._target, self._spreads = (operation, at, fault), False

    def heal(self) -> None:
        """Let all calls through again."""
        super().heal()
        self._target, self._spreads = None, False

    def answer(self, name: str, *args: Any) -> Any:
        """One call."""
        path = self._paths.get(args[0], "") if isinstance(args[0], int) else str(args[0])
        path += "/" if os.path.isdir(path) else ""
        with self._guard:
            for operation in OPERATIONS:
                if operation.when == self.when and operation.matches(name, path, _moved(name, args)):
                    self.counts[operation] += 1
            code = self._error(name, args)
        if code is not None:
            raise OSError(code, os.strerror(code))
        return super().answer(name, *self._met(name, args))

    def _error(self, name: str, args: tuple[Any, ...]) -> int | None:
        """The number of the error that a call gives, if it does."""
        if self._target is None or name == "close":
            return None
        operation, at, fault = self._target
        struck = not self._spreads and self.counts[operation] == at
        if struck or (self._spreads and _concerns(fault, name, args)):
            self._spreads = True
            return getattr(errno, fault)
        return None

    def _met(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A call's arguments after the harmless fault."""
        if self._harmless == "slow":
            time.sleep(0.0005)
        elif self._harmless == "short" and name in TRANSFERS:
            return args[0], *_part(name, args[1]), *args[2:]
        elif self._harmless == "EINTR" and name != "close" and getattr(self._own, "before", None) != name:
            self._own.before = name
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        self._own.before = None
        return args


def _concerns(fault: str, name: str, args: tuple[Any, ...]) -> bool:
    """Whether an error that was met once is met by another call too."""
    match fault:
        case "ENOENT" | "ESTALE":
            return True
        case "ENOSPC" | "EDQUOT" | "EROFS":
            return name in CHANGING or (name == "open" and bool(args[1] & os.O_CREAT))
        case _:
            return False


def _moved(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that a call is to move."""
    if name not in TRANSFERS:
        return 0
    return args[1] if name == "pread" else sum(map(len, args[1])) if name.endswith("v") else len(args[1])


def _part(name: str, moved: Any) -> tuple[Any]:
    """A part of what a call was to move."""
    if name == "pread":
        return (min(moved, 100),)
    return ([moved[0][:4096]] if name.endswith("v") else moved[:100],)


def table() -> str:
    """The matrix, in Markdown."""
    lines = ["| when | what | " + " | ".join(HEADINGS.values()) + " |", "| --- " * (2 + len(HEADINGS)) + "|"]
    when = ""
    for operation in OPERATIONS:
        outcomes = [MARKS[operation.outcome(fault)] for fault in HEADINGS]
        shown = "" if operation.when == when else TIMES[operation.when]
        lines.append(f"| {shown} | {operation.name} | " + " | ".join(outcomes) + " |")
        when = operation.when
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
