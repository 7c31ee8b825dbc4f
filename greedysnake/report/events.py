"""What the executor recorded of a step: one event per operation, and the words for its resources."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from greedysnake.schedule import Operation

RESOURCES = ("compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu")
"""Every resource, in the order in which traces and pictures show them."""

_RESOURCE_WORDS = {
    "compute": "compute",
    "h2d": "host → device",
    "d2h": "device → host",
    "ssd_read": "SSD read",
    "ssd_write": "SSD write",
    "cpu": "CPU",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationEvent:
    """One operation of a step, as it happened.

    Times are seconds on one monotonic clock that all events of a run share.

    Raises:
        ValueError: the resource is unknown, or the operation ends before it starts.
    """

    kind: str
    """What was done: ``forward``, ``load_weights``, ``update``, ..."""
    resource: str
    """Which of ``RESOURCES`` it occupied."""
    unit: int | None
    """Index of the unit it belongs to; None when it belongs to the whole step."""
    micro_batch: int | None
    """Index of the micro-batch; None when it serves all of them."""
    chunk: int | None
    """Index of the chunk of state within the unit; None when it is no part of a chunked operation."""
    start_s: float
    end_s: float
    bytes: int
    """Bytes moved; 0 for operations that only compute."""
    parameters: int = 0
    """Parameters updated; 0 for operations that update none."""
    operation: int | None = None
    """Index of the operation in the step's schedule; None where no schedule is known."""

    @classmethod
    def of(cls, operation: Operation, start_s: float, end_s: float, *, parameters: int = 0) -> Self:
        """What was recorded of an operation of a schedule."""
        return cls(
            kind=operation.kind,
            resource=operation.resource,
            unit=operation.unit,
            micro_batch=operation.micro_batch,
            chunk=operation.chunk,
            start_s=start_s,
            end_s=end_s,
            bytes=operation.bytes,
            parameters=parameters,
            operation=operation.index,
        )

    def __post_init__(self) -> None:
        if self.resource not in RESOURCES:
            raise ValueError(f"resource {self.resource!r} of {self.kind} is none of {', '.join(RESOURCES)}")
        if not self.end_s >= self.start_s:
            raise ValueError(f"{self.kind} ends at {self.end_s} s, before it starts at {self.start_s} s")


def resource_words(resource: str) -> str:
    """How a person reads ``resource``: 'SSD read' for ``ssd_read``. An unknown name is returned as it is."""
    return _RESOURCE_WORDS.get(resource, resource)


def unit_name(unit: int, unit_names: Sequence[str]) -> str:
    """The name of ``unit``, or 'unit 7' when ``unit_names`` does not reach that far."""
    return unit_names[unit] if 0 <= unit < len(unit_names) else f"unit {unit}"


def operation_name(event: OperationEvent, unit_names: Sequence[str]) -> str:
    """One operation in words: 'forward layer 3 · micro-batch 1'."""
    words = event.kind.replace("_", " ")
    if event.unit is not None and (name := unit_name(event.unit, unit_names)) != words:
        words += f" {name}"  # the operation "head" of the unit "head" is said once
    if event.micro_batch is not None:
        words += f" · micro-batch {event.micro_batch}"
    if event.chunk is not None:
        words += f" · chunk {event.chunk}"
    return words


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of some spans (start, end)."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def assign_lanes(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """A lane (0, 1, ...) for each (start, end), so that no two in a lane overlap; as few lanes as possible.

    Operations of one resource usually follow each other and all get lane 0.
    """
    lanes = [0] * len(intervals)
    lane_ends: list[float] = []
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        start, end = intervals[index]
        lane = next((i for i, lane_end in enumerate(lane_ends) if lane_end <= start), len(lane_ends))
        if lane == len(lane_ends):
            lane_ends.append(end)
        lane_ends[lane] = end
        lanes[index] = lane
    return lanes
