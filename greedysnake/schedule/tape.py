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
        # what an operation on a slot may have to wait for: uses since all of it was written, of which part, and how
        self._uses: defaultdict[Buffer, list[tuple[int, Buffer, bool]]] = defaultdict(list)
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
        for buffer, writing in [*((buffer, False) for buffer in reads), *((buffer, True) for buffer in writes)]:
            for user, used, written in self._uses[buffer.whole]:
                if (writing or written) and user != position and used.overlaps(buffer):
                    after.add(user)
        for buffer in reads:
            self._uses[buffer.whole].append((position, buffer, False))
        for buffer in writes:
            if buffer.part < 0:
                self._uses[buffer] = []
            self._uses[buffer.whole].append((position, buffer, True))
        for buffer in (*reads, *writes):
            self._last_use[buffer.whole] = position
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
