"""Proof that a schedule is safe, by code that shares nothing with the builders.

Two operations are ordered when a chain of ``after`` edges and queue order leads from one to the other; on
the SSD's queues an operation has started, not ended, when the next one starts. Every order that respects
this must be safe, not just the order of the list:

- an operation reads only what was written, and the write is ordered before the read;
- a buffer is written only when every earlier reader and writer is ordered before the write;
- memory whose content was not released is changed in place (read and written) or not at all;
- a released buffer is filled again only by an operation ordered after every use of its former content;
- what is live at the end is what the schedule says, so every load is released.
"""

from dataclasses import dataclass, field

from greedysnake.schedule.operations import Buffer, Operation, Resource, Schedule, Tier


class ScheduleError(Exception):
    """A schedule breaks a rule; the message lists what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Most bytes live at once in each tier, when the operations run one by one."""

    device: int
    host: int
    ssd: int


@dataclass
class _Life:
    """One content of a buffer, from its first write to its release."""

    uses: list[tuple[int, Buffer, bool]] = field(default_factory=list)  # since all of it was written; whether written
    accesses: list[int] = field(default_factory=list)


_OVERLAPPING = frozenset({Resource.SSD_READ, Resource.SSD_WRITE})
"""Resources whose queue goes on while a transfer is under way: an operation there may end after the next one."""


class _Order:
    """Happens-before: for each operation, the set of those that have always ended when it starts, as bits."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self._ended: list[int] = []
        latest: dict[Resource, int] = {}
        for position, operation in enumerate(operations):
            ended = 0
            for earlier in operation.after:
                ended |= self._ended[earlier] | 1 << earlier
            before = latest.get(operation.resource)
            if before is not None:  # it has started, so what it waited for has ended
                ended |= self._ended[before] | (0 if operation.resource in _OVERLAPPING else 1 << before)
            self._ended.append(ended)
            latest[operation.resource] = position

    def before(self, first: int, second: int) -> bool:
        """Whether ``first`` has always ended when ``second`` starts."""
        return bool(self._ended[second] >> first & 1)


def check_schedule(schedule: Schedule) -> Peaks:
    """Prove ``schedule`` safe, and give the bytes that it needs at once.

    Raises:
        ScheduleError: with one line for each broken rule.
    """
    problems = _malformed(schedule)
    if problems:  # what is below needs edges that lead back and buffers that exist
        raise ScheduleError("\n".join(problems))
    walk = _Walk(schedule)
    for position, operation in enumerate(schedule.operations):
        for buffer in operation.reads:
            walk.read(position, buffer)
        for buffer in operation.writes:
            walk.write(position, buffer)
        walk.take_peak()
        for buffer in operation.releases:
            walk.release(position, buffer)
    walk.end()
    if walk.problems:
        raise ScheduleError("\n".join(walk.problems))
    return Peaks(device=walk.peak[Tier.DEVICE], host=walk.peak[Tier.HOST], ssd=walk.peak[Tier.SSD])


def _malformed(schedule: Schedule) -> list[str]:
    """Operations out of their place, edges that do not lead back, buffers that are in no pool."""
    operations = schedule.operations
    problems = [
        f"{operation}: waits for {earlier}, which is not before it"
        for position, operation in enumerate(operations)
        for earlier in operation.after
        if not 0 <= earlier < position
    ]
    problems += [
        f"operation at position {position} has index {operation.index}"
        for position, operation in enumerate(operations)
        if operation.index != position
    ]
    unknown = {
        buffer
        for operation in operations
        for buffer in (*operation.reads, *operation.writes, *operation.releases)
        if buffer.pool not in schedule.pools or buffer.slot >= len(schedule.pools[buffer.pool].slot_bytes)
    }
    return problems + [f"{buffer} is in no pool" for buffer in sorted(unknown)]


class _Walk:
    """What every buffer holds as the operations go by in their order, and which rules they break.

    Attributes:
        problems: a line for each broken rule.
        peak: most bytes live at once so far, by tier.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.problems: list[str] = []
        self._schedule = schedule
        self._operations = schedule.operations
        self._order = _Order(schedule.operations)
        self._live = {buffer: _Life() for buffer in schedule.live_in}
        self._former: dict[Buffer, list[int]] = {}  # accesses of the content released last
        self._now = dict.fromkeys(Tier, 0)
        for buffer in self._live:
            self._take(buffer, 1)
        self.peak = dict(self._now)

    def read(self, position: int, buffer: Buffer) -> None:
        """The operation at ``position`` reads a buffer."""
        life = self._live.get(buffer.whole)
        if life is None:
            self.problems.append(f"{self._operations[position]}: reads {buffer}, which holds nothing")
            return
        self.problems += [
            f"{self._operations[position]}: reads {buffer} without waiting for {self._operations[other]}"
            for other, used, written in life.uses
            if written and used.overlaps(buffer) and not self._order.before(other, position)
        ]
        life.uses.append((position, buffer, False))
        life.accesses.append(position)

    def write(self, position: int, buffer: Buffer) -> None:
        """The operation at ``position`` writes a buffer: fills it, or changes what is there."""
        operation, slot = self._operations[position], buffer.whole
        if slot not in self._live:
            self.problems += [
                f"{operation}: reuses {buffer} without waiting for {self._operations[other]}"
                for other in self._former.get(slot, ())
                if not self._order.before(other, position)
            ]
            self._live[slot] = _Life()
            self._take(slot, 1)
        elif self._schedule.pools[buffer.pool].tier != Tier.SSD and buffer not in operation.reads:
            self.problems.append(f"{operation}: fills {buffer}, whose content was never released")
        life = self._live[slot]
        self.problems += [
            f"{operation}: writes {buffer} without waiting for {self._operations[other]}"
            for other, used, _ in life.uses
            if other != position and used.overlaps(buffer) and not self._order.before(other, position)
        ]
        if buffer == slot:  # whatever was before is ordered before this
            life.uses = []
        life.uses.append((position, buffer, True))
        life.accesses.append(position)

    def take_peak(self) -> None:
        """Note what is live now, before the operation's releases."""
        for tier in Tier:
            self.peak[tier] = max(self.peak[tier], self._now[tier])

    def release(self, position: int, buffer: Buffer) -> None:
        """The operation at ``position`` lets go of a buffer's content."""
        ended = self._live.pop(buffer, None)
        if ended is None:
            self.problems.append(f"{self._operations[position]}: releases {buffer}, which holds nothing")
            return
        self._former[buffer] = ended.accesses
        self._take(buffer, -1)

    def end(self) -> None:
        """What is live at the end is what the schedule says."""
        live, live_out = set(self._live), self._schedule.live_out
        self.problems += [f"{buffer} is never released" for buffer in sorted(live - live_out)]
        self.problems += [f"{buffer} should hold content at the end" for buffer in sorted(live_out - live)]

    def _take(self, buffer: Buffer, times: int) -> None:
        pool = self._schedule.pools[buffer.pool]
        self._now[pool.tier] += times * pool.slot_bytes[buffer.slot]
