"""What the numbers of a run say: medians, rates, the bottleneck and what it waits for. Nothing is guessed."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greedysnake.report.events import RESOURCES, OperationEvent, union_seconds
from greedysnake.report.run_files import TracedStep, mapping, number

Step = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The busiest resource, by medians over steps."""

    resource: str
    share: float
    """Of a step's wall time, the part (0 to 1) in which the resource is busy."""
    step_s: float
    alone_s: float
    """Seconds of work that the resource has in a step: a step can not be shorter."""


@dataclass(frozen=True, kw_only=True)
class KindTime:
    """All operations of one kind in a step."""

    resource: str
    kind: str
    count: int
    seconds: float
    """Wall time in which at least one of them ran."""
    bytes: int
    parameters: int
    """Parameters updated."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A stretch of a step in which a resource did nothing."""

    start_s: float
    seconds: float
    before: OperationEvent | None
    """What ended it; None at the step's end."""


def steady(steps: Sequence[Step]) -> Sequence[Step]:
    """Steps without the first, which also warms up; the first if there is no other."""
    return steps[1:] or steps


def series(steps: Iterable[Step], value: Callable[[Step], float | None]) -> list[tuple[int, float]]:
    """(step, value) where there is a value."""
    return [(step["step"], found) for step in steps if (found := value(step)) is not None]


def median(steps: Iterable[Step], value: Callable[[Step], float | None]) -> float | None:
    """The median of ``value`` over steps that have one; None if none has."""
    values = [found for step in steps if (found := value(step)) is not None]
    return statistics.median(values) if values else None


def of(name: str) -> Callable[[Step], float | None]:
    """Reads the number ``name`` of a step."""
    return lambda step: number(step.get(name))


def busy(resource: str) -> Callable[[Step], float | None]:
    """Reads the busy share of ``resource`` of a step."""
    return lambda step: number(mapping(step.get("busy")).get(resource))


def busy_rate(direction: str) -> Callable[[Step], float | None]:
    """Reads bytes per second of ``direction`` (``ssd_read`` or ``ssd_write``) while it was busy in a step."""

    def rate(step: Step) -> float | None:
        moved, seconds, share = of(f"{direction}_bytes")(step), of("seconds")(step), busy(direction)(step)
        return moved / (seconds * share) if moved and seconds and share else None

    return rate


def step_rate(direction: str) -> Callable[[Step], float | None]:
    """Reads bytes per second of ``direction`` over the whole of a step."""

    def rate(step: Step) -> float | None:
        moved, seconds = of(f"{direction}_bytes")(step), of("seconds")(step)
        return moved / seconds if moved is not None and seconds else None

    return rate


def highest(steps: Iterable[Step], name: str) -> float | None:
    """The highest value of the number ``name``; None if no step has it."""
    return max((value for _, value in series(steps, of(name))), default=None)


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each value's mean with its neighbours, over a thirtieth of all points (at the ends over fewer).

    Of the values that a mean is over, the highest and the lowest fifth do not count: one wild step is no trend.
    """
    reach = min(100, max(1, len(points) // 60))
    means = []
    for index, (step, _) in enumerate(points):
        around = min(reach, index, len(points) - 1 - index)
        values = sorted(value for _, value in points[index - around : index + around + 1])
        cut = len(values) // 5
        means.append((step, statistics.fmean(values[cut : len(values) - cut])))
    return means


def median_shares(steps: Sequence[Step]) -> dict[str, float]:
    """The median busy share of every resource that was recorded, the busiest first."""
    found = {resource: median(steady(steps), busy(resource)) for resource in RESOURCES}
    shares = {resource: share for resource, share in found.items() if share is not None}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def bottleneck(steps: Sequence[Step]) -> Bottleneck | None:
    """The busiest resource and how far a step is from it alone; None if no resource was recorded busy."""
    shares = median_shares(steps)
    step_s = median(steady(steps), of("seconds"))
    resource = next(iter(shares), None)
    if resource is None or not shares[resource] > 0 or not step_s:
        return None
    return Bottleneck(
        resource=resource, share=shares[resource], step_s=step_s, alone_s=min(step_s, shares[resource] * step_s)
    )


def step_seconds(traced: TracedStep) -> float:
    """Seconds from the first event of a traced step to its last."""
    return max(event.end_s for event in traced.events)


def times_by_kind(traced: TracedStep) -> list[KindTime]:
    """Where a traced step's time goes: by resource in the usual order, in each the longest first."""
    groups: dict[tuple[str, str], list[OperationEvent]] = {}
    for event in traced.events:
        groups.setdefault((event.resource, event.kind), []).append(event)
    times = [
        KindTime(
            resource=resource,
            kind=kind,
            count=len(events),
            seconds=covered_seconds(events),
            bytes=sum(event.bytes for event in events),
            parameters=sum(event.parameters for event in events),
        )
        for (resource, kind), events in groups.items()
    ]
    return sorted(times, key=lambda time: (RESOURCES.index(time.resource), -time.seconds))


def covered_seconds(events: Iterable[OperationEvent]) -> float:
    """Wall time in which at least one of ``events`` ran."""
    return union_seconds((event.start_s, event.end_s) for event in events)


def longest_waits(traced: TracedStep, resource: str, count: int) -> list[Wait]:
    """The longest stretches in which ``resource`` did nothing, of at least a hundredth of the step, longest first."""
    whole = step_seconds(traced)
    waits, reached = [], 0.0
    for event in sorted((e for e in traced.events if e.resource == resource), key=lambda e: e.start_s):
        waits.append(Wait(start_s=reached, seconds=event.start_s - reached, before=event))
        reached = max(reached, event.end_s)
    waits.append(Wait(start_s=reached, seconds=whole - reached, before=None))
    long = [wait for wait in waits if wait.seconds >= 0.01 * whole > 0]
    return sorted(long, key=lambda wait: -wait.seconds)[:count]
