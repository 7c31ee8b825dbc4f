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
    problems += [f"{buffer} is in no pool" for buffer in sorted(unknown)]
    if problems:
        raise ScheduleError("\n".join(problems))

    order = _Order(operations)
    live: dict[Buffer, _Life] = {buffer: _Life() for buffer in schedule.live_in}
    former: dict[Buffer, list[int]] = {}  # accesses of the content released last
    now = dict.fromkeys(Tier, 0)
    for buffer in live:
        now[schedule.pools[buffer.pool].tier] += schedule.pools[buffer.pool].slot_bytes[buffer.slot]
    peak = dict(now)

    for position, operation in enumerate(operations):
        for buffer in operation.reads:
            life = live.get(buffer.whole)
            if life is None:
                problems.append(f"{operation}: reads {buffer}, which holds nothing")
                continue
            problems += [
                f"{operation}: reads {buffer} without waiting for {operations[other]}"
                for other, used, written in life.uses
                if written and used.overlaps(buffer) and not order.before(other, position)
            ]
            life.uses.append((position, buffer, False))
            life.accesses.append(position)
        for buffer in operation.writes:
            slot, pool = buffer.whole, schedule.pools[buffer.pool]
            if slot not in live:
                problems += [
                    f"{operation}: reuses {buffer} without waiting for {operations[other]}"
                    for other in former.get(slot, ())
                    if not order.before(other, position)
                ]
                live[slot] = _Life()
                now[pool.tier] += pool.slot_bytes[buffer.slot]
            elif pool.tier != Tier.SSD and buffer not in operation.reads:
                problems.append(f"{operation}: fills {buffer}, whose content was never released")
            life = live[slot]
            problems += [
                f"{operation}: writes {buffer} without waiting for {operations[other]}"
                for other, used, _ in life.uses
                if other != position and used.overlaps(buffer) and not order.before(other, position)
            ]
            if buffer == slot:  # whatever was before is ordered before this
                life.uses = []
            life.uses.append((position, buffer, True))
            life.accesses.append(position)
        for tier in Tier:
            peak[tier] = max(peak[tier], now[tier])
        for buffer in operation.releases:
            ended = live.pop(buffer, None)
            if ended is None:
                problems.append(f"{operation}: releases {buffer}, which holds nothing")
                continue
            former[buffer] = ended.accesses
            pool = schedule.pools[buffer.pool]
            now[pool.tier] -= pool.slot_bytes[buffer.slot]

    problems += [f"{buffer} is never released" for buffer in sorted(set(live) - schedule.live_out)]
    problems += [f"{buffer} should hold content at the end" for buffer in sorted(schedule.live_out - set(live))]
    if problems:
        raise ScheduleError("\n".join(problems))
    return Peaks(device=peak[Tier.DEVICE], host=peak[Tier.HOST], ssd=peak[Tier.SSD])
