"""What a power cut may leave of a recorded run: everything that the disk had not been made to keep is open.

The model promises no more than POSIX does. The bytes of a file last when a flush of the file has ended that began after
their write had ended; names last when their folder was flushed likewise. Of everything else any part may be there: a
write whole, not at all, or some of its blocks (512 or 4096 bytes), an older version of a block after a newer one was
lost, a file longer or shorter, a name made, moved or removed, or not.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from recorded_disk import Event, Operation, RecordingSystem

FOLDER = -1
"""In place of a file's number, for a name that is a folder's."""

BLOCKS = (512, 4096)

Tree = dict[Path, bytes | None]
"""What a disk holds: bytes of every file, None for folders, parents first."""

Fate = Callable[[Operation], bool | float]
"""Of an operation that need not last: whether it is there, or the share of its blocks that are."""


@dataclass(frozen=True, kw_only=True)
class CrashState:
    """One thing that the next start of the machine may find.

    Attributes:
        moment: number of the events before the power cut.
        tree: what the disk holds.
        last: steps of the last commit that had ended, None if there was none.
        under_way: steps of a commit that had begun, None if there was none.
        quiet: whether nothing was asked of the disk since the last commit ended.
    """

    moment: int
    tree: Tree = field(repr=False)
    last: int | None
    under_way: int | None
    quiet: bool


class _Lasting:
    """A file's bytes, or a folder's names, that are sure to last, and the operations that are not."""

    def __init__(self, content: bytes = b"", names: dict[str, int] | None = None) -> None:
        self.content = content
        self.names = dict(names or {})
        self.pending: list[Operation] = []

    def flushed(self, operations: Sequence[Operation]) -> None:
        self.content, self.names = self.after(operations, lambda _: True, Random(0))
        self.pending = [operation for operation in self.pending if operation not in operations]

    def after(self, operations: Sequence[Operation], fate: Fate, random: Random) -> tuple[bytes, dict[str, int]]:
        """With the operations as fate has it."""
        content, names = self.content, self.names
        changed: bytearray | None = None
        for operation in operations:
            there = fate(operation)
            if there is False:
                continue
            if operation.kind in _CHANGES_NAMES:
                names = {**names, **_names_after(operation)}
            else:
                changed = bytearray(content) if changed is None else changed
                _change(changed, operation, float(there), random)
        return (content if changed is None else bytes(changed)), names


_CHANGES_BYTES = ("write", "truncate", "reserve")
_CHANGES_NAMES = ("create", "mkdir", "rename", "unlink", "rmdir")
_GONE = -2


def _names_after(operation: Operation) -> dict[str, int]:
    """The names in a folder that an operation changes, in one instant."""
    name, file = operation.path.name, -1 if operation.file is None else operation.file
    match operation.kind:
        case "create":
            return {name: file}
        case "mkdir":
            return {name: FOLDER}
        case "rename":
            assert operation.target is not None
            return {name: _GONE, operation.target.name: file}
        case _:
            return {name: _GONE}


def _change(content: bytearray, operation: Operation, share: float, random: Random) -> None:
    """Carry an operation out on a file's bytes, a write in part if it is not whole."""
    if operation.kind == "truncate":
        del content[operation.size :]
    if operation.kind in ("truncate", "reserve"):
        content.extend(bytes(max(0, operation.size - len(content))))
        return
    start, end = operation.offset, operation.offset + len(operation.data)
    if share == 1:
        content.extend(bytes(max(0, end - len(content))))
        content[start:end] = operation.data
        return
    block = random.choice(BLOCKS)
    for low in range(start - start % block, end, block):
        if random.random() < share:
            first, last = max(low, start), min(low + block, end)
            content.extend(bytes(max(0, last - len(content))))
            content[first:last] = operation.data[first - start : last - start]


class PowerCuts:
    """Plays a recording back, and gives what a power cut may leave after each event.

    Args:
        recording: of a run.
        irrelevant: names of files whose bytes nobody reads again, so that it makes no difference which are there.
        seed: of what is left to chance.
        chances: states by chance after each event, besides the systematic ones.
    """

    def __init__(self, recording: RecordingSystem, *, irrelevant: Collection[str], seed: int, chances: int) -> None:
        self._base = recording.base
        self._irrelevant = irrelevant
        self._random = Random(seed)
        self._chances = chances
        self._files = {number: _Lasting(content) for number, (_, content) in recording.before.items()}
        self._folders = {path: _Lasting() for path in recording.folders_before}
        for path in recording.folders_before[1:]:
            self._folders[path.parent].names[path.name] = FOLDER
        for number, (path, _) in recording.before.items():
            self._folders[path.parent].names[path.name] = number
        self._ended: set[Operation] = set()
        self._covered: dict[Operation, list[Operation]] = {}

    def states(self, events: Sequence[Event], *, last: int | None = None) -> Iterator[CrashState]:
        """Every state, in order of the moment.

        Args:
            events: those of the recording, or what a faulty store would have caused instead.
            last: steps of the commit from which the run began.
        """
        under_way, quiet = None, False
        for moment, event in enumerate(events, 1):
            operation = event.operation
            if operation is not None and operation.path.name in self._irrelevant and operation.kind in _CHANGES_BYTES:
                continue
            match event.phase:
                case "commit":
                    under_way = event.steps
                case "committed":
                    last, under_way, quiet = event.steps, None, True
                case "begin":
                    assert operation is not None
                    self._begin(operation)
                    quiet = False
                case "end":
                    assert operation is not None
                    self._end(operation)
            for fate in self._fates():
                tree = self._tree(fate)
                yield CrashState(moment=moment, tree=tree, last=last, under_way=under_way, quiet=quiet)

    def _begin(self, operation: Operation) -> None:
        if operation.kind == "mkdir":
            self._folders[operation.path] = _Lasting()
        if operation.kind == "create":
            assert operation.file is not None
            self._files[operation.file] = _Lasting()
        if operation.kind == "flush":
            self._covered[operation] = [one for one in self._kept(operation).pending if one in self._ended]
        else:
            self._kept(operation).pending.append(operation)

    def _end(self, operation: Operation) -> None:
        self._ended.add(operation)
        if operation.kind == "flush":
            self._kept(operation).flushed(self._covered.pop(operation))

    def _kept(self, operation: Operation) -> _Lasting:
        """What an operation is about: a folder's names or a file's bytes."""
        if operation.kind in _CHANGES_NAMES:
            return self._folders[operation.path.parent]
        return self._folders[operation.path] if operation.file is None else self._files[operation.file]

    def _fates(self) -> Iterator[Fate]:
        """Everything is there, nothing, names or bytes alone, all but one name or one file's bytes; then by chance."""
        yield lambda _: True
        yield lambda _: False
        yield lambda operation: operation.kind in _CHANGES_NAMES
        yield lambda operation: operation.kind not in _CHANGES_NAMES
        for folder in self._folders.values():
            for lost in folder.pending:
                yield lambda operation, lost=lost: operation is not lost
        for number, file in self._files.items():
            if file.pending:
                yield lambda operation, lost=number: operation.kind in _CHANGES_NAMES or operation.file != lost
        for _ in range(self._chances):
            lost, torn = self._random.choice([0.1, 0.5, 0.9]), self._random.choice([0.0, 0.5, 1.0])
            yield lambda operation, lost=lost, torn=torn: self._by_chance(operation, lost, torn)

    def _by_chance(self, operation: Operation, lost: float, torn: float) -> bool | float:
        if self._random.random() < lost:
            return False
        if operation.kind == "write" and self._random.random() < torn:
            return self._random.choice([0.1, 0.5, 0.9])
        return True

    def _tree(self, fate: Fate) -> Tree:
        tree: Tree = {}
        known: dict[int, bytes] = {}
        self._add(tree, self._base, fate, known)
        return tree

    def _add(self, tree: Tree, path: Path, fate: Fate, known: dict[int, bytes]) -> None:
        tree[path] = None
        folder = self._folders[path]
        _, names = folder.after(folder.pending, fate, self._random)
        for name, number in names.items():
            if number == FOLDER:
                self._add(tree, path / name, fate, known)
            elif number != _GONE:
                if number not in known:
                    file = self._files[number]
                    known[number], _ = file.after(file.pending, fate, self._random)
                tree[path / name] = known[number]
