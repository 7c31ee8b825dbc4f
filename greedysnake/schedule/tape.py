"""A list of operations that works out its own dependencies.

An operation waits for whatever its buffers make it wait for: read after write, write after read, write
after write. Slots of shared pools are handed out and taken back here, so that a builder of a schedule
states only what happens, in order.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from greedysnake.schedule.operations import Buffer, Kind, Operation, Pool, Resource
from greedysnake.schedule.pools import SHARED_POOLS


@dataclass
class _Draft:
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
    releases: list[Buffer] = field(default_factory=list)


class OperationTape:
    """Operations in the order in which they are appended.

    Args:
        pools: the memory that they happen in.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.pools = dict(pools)
        self._drafts: list[_Draft] = []
        # what an operation on a slot may have to wait for: its uses since all of it was written, and of which part
        self._readers: defaultdict[Buffer, list[tuple[int, Buffer]]] = defaultdict(list)
        self._writers: defaultdict[Buffer, list[tuple[int, Buffer]]] = defaultdict(list)
        self._last_use: dict[Buffer, int] = {}
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
        self._drafts[self._last_use[buffer]].releases.append(buffer)
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
        for buffer in reads:
            after.update(user for user, used in self._writers[buffer.whole] if used.overlaps(buffer))
        for buffer in writes:
            whole = buffer.whole
            after.update(user for user, used in self._writers[whole] if used.overlaps(buffer))
            after.update(user for user, used in self._readers[whole] if used.overlaps(buffer))
        for buffer in reads:
            whole = buffer.whole
            self._readers[whole].append((position, buffer))
            self._last_use[whole] = position
        for buffer in writes:
            whole = buffer.whole
            if buffer.part < 0:
                self._readers[whole] = []
                self._writers[whole] = []
            self._writers[whole].append((position, buffer))
            self._last_use[whole] = position
        self._drafts.append(
            _Draft(kind, resource, unit, micro_batch, chunk, reads, writes, tuple(sorted(after)), bytes)
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
