"""A list of operations that works out its own dependencies.

An operation waits for whatever its buffers make it wait for: read after write, write after read, write
after write. Slots of shared pools are handed out and taken back here, so that a builder of a schedule
states only what happens, in order.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from greedysnake.schedule.operations import Buffer, Kind, Operation, Pool, Resource
from greedysnake.schedule.pools import SHARED_POOLS


class _Uses:
    """Operations that have read, or written, a slot since all of it was written last.

    Attributes:
        every: all of them.
        of_whole: those on the whole slot; the same list as long as there are no others.
        of_parts: the others, by part.
    """

    __slots__ = ("every", "of_parts", "of_whole")

    def __init__(self, *first: int) -> None:
        self.every = self.of_whole = list(first)
        self.of_parts: dict[int, list[int]] = {}

    def add(self, position: int, part: int) -> None:
        """Count an operation on a part of the slot, or on all of it where ``part`` is below 0."""
        if part >= 0:
            if self.of_whole is self.every:
                self.of_whole = list(self.every)
            self.of_parts.setdefault(part, []).append(position)
        elif self.of_whole is not self.every:
            self.of_whole.append(position)
        self.every.append(position)

    def meeting(self, part: int) -> list[int]:
        """Those that an operation on a part, or on all of the slot, shares memory with."""
        if part < 0:
            return self.every
        return self.of_whole + self.of_parts.get(part, [])


class _Slot:
    """What the next operation on a slot may have to wait for, and the last one so far."""

    __slots__ = ("last_use", "readers", "writers")

    def __init__(self) -> None:
        self.readers = _Uses()
        self.writers = _Uses()
        self.last_use = -1


class _Draft(NamedTuple):
    """An operation whose releases are not known yet."""

    kind: Kind
    resource: Resource
    unit: int | None
    micro_batch: int | None
    chunk: int | None
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    after: tuple[int, ...]
    bytes: int
    releases: list[Buffer]


class OperationTape:
    """Operations in the order in which they are appended.

    Args:
        pools: the memory that they happen in.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.pools = dict(pools)
        self._drafts: list[_Draft] = []
        self._slots: defaultdict[Buffer, _Slot] = defaultdict(_Slot)
        self._free = {
            name: deque(Buffer(name, slot) for slot in range(len(self.pools[name].slot_bytes))) for name in SHARED_POOLS
        }

    def take(self, pool: str) -> Buffer:
        """The slot of ``pool`` that has been free for longest."""
        if not self._free[pool]:
            raise ValueError(f"pool {pool!r} has too few slots ({len(self.pools[pool].slot_bytes)}) for this schedule")
        return self._free[pool].popleft()

    def release(self, buffer: Buffer) -> None:
        """Mark the end of ``buffer``'s content at its last use so far."""
        self._drafts[self._slots[buffer].last_use].releases.append(buffer)
        if buffer.pool in self._free:
            self._free[buffer.pool].append(buffer)

    def has_free(self, pool: str) -> bool:
        """Whether a slot of ``pool`` is free."""
        return bool(self._free[pool])

    def emit(
        self,
        kind: Kind,
        resource: Resource,
        *,
        unit: int | None = None,
        micro_batch: int | None = None,
        chunk: int | None = None,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        bytes: int = 0,
        also_after: Iterable[int] = (),
    ) -> int:
        """Append an operation that waits for what its buffers make it wait for, and for ``also_after``; its index."""
        reads, writes = tuple(reads), tuple(writes)
        position = len(self._drafts)
        after = set(also_after)
        slots = self._slots
        for buffer in reads:
            part = buffer.part
            slot = slots[buffer if part < 0 else buffer.whole]
            slot.last_use = position
            if part < 0:
                after.update(slot.writers.every)
            else:
                after.update(slot.writers.meeting(part))
            slot.readers.add(position, part)
        for buffer in writes:
            part = buffer.part
            slot = slots[buffer if part < 0 else buffer.whole]
            slot.last_use = position
            if part < 0:
                after.update(slot.writers.every, slot.readers.every)
                slot.writers = _Uses(position)
                if slot.readers.every:
                    slot.readers = _Uses()
            else:
                after.update(slot.writers.meeting(part), slot.readers.meeting(part))
                slot.writers.add(position, part)
        after.discard(position)  # which may have read what it writes
        self._drafts.append(
            _Draft(kind, resource, unit, micro_batch, chunk, reads, writes, tuple(sorted(after)), bytes, [])
        )
        return position

    def operations(self) -> tuple[Operation, ...]:
        """Everything appended so far."""
        return tuple(
            Operation(
                index=index,
                kind=draft.kind,
                resource=draft.resource,
                unit=draft.unit,
                micro_batch=draft.micro_batch,
                chunk=draft.chunk,
                reads=draft.reads,
                writes=draft.writes,
                releases=tuple(draft.releases),
                after=draft.after,
                bytes=draft.bytes,
            )
            for index, draft in enumerate(self._drafts)
        )
