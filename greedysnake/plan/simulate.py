"""When every operation of a schedule would run on a given machine: a discrete-event simulation.

The rules are the executor's. Each resource has one queue in the order of the schedule. An operation starts
when the operations before it have ended and its queue has come to it. The SSD's queues do not wait for the
end of a transfer before they start the next, but the storage's threads take pieces in the order in which they
were submitted, so each direction is served in order. What resources share is a fluid: a transfer's rate
changes at the moment at which traffic in the other direction begins or ends. A step begins when the one
before it has ended.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from greedysnake.plan.costs import StepCosts
from greedysnake.report.events import OperationEvent, union_seconds
from greedysnake.schedule import Resource, Schedule, StepShape, Tier

_RESOURCES = tuple(Resource)
_NUMBER = {resource: number for number, resource in enumerate(_RESOURCES)}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step as it would run.

    Attributes:
        schedule: what was simulated.
        seconds: of the whole step, what lies outside its operations included.
        starts, ends: of each operation, seconds from the beginning of the step.
        busy: seconds in which each resource had an operation.
        disk_busy: seconds with a transfer in either direction.
        ssd_read_bytes, ssd_written_bytes: moved.
        order: all starts (an operation's index) and ends (``~index``) in the order of time.
    """

    schedule: Schedule
    seconds: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    busy: dict[Resource, float]
    disk_busy: float
    ssd_read_bytes: int
    ssd_written_bytes: int
    order: tuple[int, ...]

    @cached_property
    def peak_bytes(self) -> dict[Tier, int]:
        """Most bytes live at once in each tier; worked out when asked for, as a search does not."""
        return _peaks(self.schedule, self.order)

    @property
    def busy_shares(self) -> dict[Resource, float]:
        """Busy seconds of each resource as a share of the step."""
        return {resource: busy / self.seconds if self.seconds else 0.0 for resource, busy in self.busy.items()}

    def events(self, from_second: float = 0.0) -> list[OperationEvent]:
        """The operations as a trace of a real step has them, so that the same pictures show them."""
        return [
            OperationEvent.of(operation, from_second + start, from_second + end)
            for operation, start, end in zip(self.schedule.operations, self.starts, self.ends, strict=True)
        ]


def simulate(schedule: Schedule, shape: StepShape, costs: StepCosts) -> Simulation:
    """Run a schedule on a machine that exists as rates only.

    Args:
        schedule: of one step.
        shape: what it was built from.
        costs: of its operations.

    Raises:
        ValueError: an operation waits for one behind it in its own queue, so that the schedule cannot end.
    """
    work = [costs.work(operation, shape) for operation in schedule.operations]
    moved = dict.fromkeys((Resource.SSD_READ, Resource.SSD_WRITE), 0)
    for operation in schedule.operations:
        if operation.resource in moved:
            moved[operation.resource] += operation.bytes
    _lengthen(work, schedule, costs.contention.transfer * sum(moved.values()))
    starts, ends, order = _run(schedule, work, _slow_down(costs))
    return Simulation(
        schedule=schedule,
        seconds=max(ends, default=0.0) + costs.step_overhead,
        starts=tuple(starts),
        ends=tuple(ends),
        busy=_busy(schedule, starts, ends),
        disk_busy=union_seconds(
            (start, end)
            for operation, start, end in zip(schedule.operations, starts, ends, strict=True)
            if operation.resource in moved
        ),
        ssd_read_bytes=moved[Resource.SSD_READ],
        ssd_written_bytes=moved[Resource.SSD_WRITE],
        order=tuple(order),
    )


def _lengthen(work: list[float], schedule: Schedule, lost: float) -> None:
    """Add seconds that computation loses to its operations, to each in proportion."""
    if not lost:
        return
    computing = [operation.index for operation in schedule.operations if operation.resource == Resource.COMPUTE]
    total = sum(work[index] for index in computing)
    for index in computing if total else ():
        work[index] *= 1 + lost / total


def _slow_down(costs: StepCosts) -> dict[Resource, tuple[Resource, float]]:
    """For each resource that shares something: with which, and its speed while both are busy."""
    disk, both = costs.disk, costs.contention
    return {
        Resource.SSD_READ: (Resource.SSD_WRITE, disk.mixed_read / disk.read),
        Resource.SSD_WRITE: (Resource.SSD_READ, disk.mixed_write / disk.write),
        Resource.COMPUTE: (Resource.CPU, both.compute),
        Resource.CPU: (Resource.COMPUTE, both.cpu),
    }


def _run(
    schedule: Schedule, work: Sequence[float], slow_down: dict[Resource, tuple[Resource, float]]
) -> tuple[list[float], list[float], list[int]]:
    """Start and end of each operation, and all starts (index) and ends (~index) in the order of time.

    At most one operation of a resource is served at a time, so the state is small: for each resource, the one
    that it serves, when it will end, and at what speed it is going on.
    """
    operations = schedule.operations
    queues: list[list[int]] = [[] for _ in _RESOURCES]
    followers: list[list[int]] = [[] for _ in operations]
    waits, queue_of = [0] * len(operations), [0] * len(operations)
    for operation in operations:
        number = _NUMBER[operation.resource]
        queues[number].append(operation.index)
        queue_of[operation.index] = number
        waits[operation.index] = len(operation.after)
        for earlier in operation.after:
            followers[earlier].append(operation.index)
    partner, mixed_speed = [-1] * len(queues), [1.0] * len(queues)
    for resource, (sharer, mixed) in slow_down.items():
        partner[_NUMBER[resource]], mixed_speed[_NUMBER[resource]] = _NUMBER[sharer], mixed

    starts, ends, order = [0.0] * len(operations), [0.0] * len(operations), []
    position, serving, finish = [0] * len(queues), [-1] * len(queues), [inf] * len(queues)
    speed = [1.0] * len(queues)
    now, left = 0.0, len(operations)

    def change_speed(number: int, new: float) -> None:
        if speed[number] != new:
            finish[number] = now + (finish[number] - now) * speed[number] / new
            speed[number] = new

    def start_next(number: int) -> None:
        if serving[number] >= 0 or position[number] == len(queues[number]):
            return
        index = queues[number][position[number]]
        if waits[index]:
            return
        position[number] += 1
        other = partner[number]
        shared = other >= 0 and serving[other] >= 0
        speed[number] = mixed_speed[number] if shared else 1.0
        serving[number], starts[index], finish[number] = index, now, now + work[index] / speed[number]
        order.append(index)
        if shared:
            change_speed(other, mixed_speed[other])

    for number in range(len(queues)):
        start_next(number)
    while left:
        now = min(finish)
        if now == inf:
            stuck = next(operation for operation in operations if waits[operation.index])
            raise ValueError(f"the schedule cannot end: {stuck} waits for an operation behind it in its own queue")
        number = finish.index(now)
        index = serving[number]
        serving[number], finish[number], ends[index] = -1, inf, now
        order.append(~index)
        left -= 1
        other = partner[number]
        if other >= 0 and serving[other] >= 0:
            change_speed(other, 1.0)
        for follower in followers[index]:
            waits[follower] -= 1
            if not waits[follower]:
                start_next(queue_of[follower])
        start_next(number)
    return starts, ends, order


def _busy(schedule: Schedule, starts: Sequence[float], ends: Sequence[float]) -> dict[Resource, float]:
    busy: defaultdict[Resource, float] = defaultdict(float)
    for operation, start, end in zip(schedule.operations, starts, ends, strict=True):
        busy[operation.resource] += end - start
    return {resource: busy[resource] for resource in _RESOURCES}


def _peaks(schedule: Schedule, order: Sequence[int]) -> dict[Tier, int]:
    """Most bytes live at once in each tier: from the start of what fills a buffer to the end of what releases it."""
    now, live = dict.fromkeys(Tier, 0), set(schedule.live_in)
    place = {name: (pool.tier, pool.slot_bytes) for name, pool in schedule.pools.items()}
    for buffer in live:
        tier, sizes = place[buffer.pool]
        now[tier] += sizes[buffer.slot]
    peak = dict(now)
    for event in order:
        if event >= 0:
            for buffer in (written.whole for written in schedule.operations[event].writes):
                if buffer not in live:
                    live.add(buffer)
                    tier, sizes = place[buffer.pool]
                    now[tier] += sizes[buffer.slot]
                    peak[tier] = max(peak[tier], now[tier])
        else:
            for buffer in schedule.operations[~event].releases:
                live.discard(buffer)
                tier, sizes = place[buffer.pool]
                now[tier] -= sizes[buffer.slot]
    return peak
