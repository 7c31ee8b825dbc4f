"""How much of each slot of a pool a run's schedules ever fill.

A pool has slots of one size, that of the largest unit or chunk, so that any content may come into any of them. But a
schedule says which content comes into which slot, and a slot that only ever holds smaller ones needs no more memory
than the largest of these.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from greedysnake.schedule.operations import Buffer, Operation, Pool, Schedule
from greedysnake.schedule.shape import StepShape

_WEIGHTS = frozenset({"weights", "device_weights"})
_GRADIENTS = frozenset({"gradient", "device_gradient"})
_CHUNKS = {"state": "state_bytes", "gradient_chunk": "gradient_bytes"}
FITTED_POOLS = _WEIGHTS | _GRADIENTS | _CHUNKS.keys()
"""Pools whose slots hold contents of different sizes, one after another."""


def slot_extents(schedules: Iterable[Schedule], shape: StepShape) -> dict[Buffer, int]:
    """Bytes of the largest content that any of the schedules brings into each slot of :data:`FITTED_POOLS`.

    At least one for a slot that is used at all; slots that are not are left out.

    Args:
        schedules: all that will run in the same memory.
        shape: what they were built from.
    """
    extents: defaultdict[Buffer, int] = defaultdict(int)
    for schedule in schedules:
        for operation in schedule.operations:
            for buffer in operation.writes:
                if buffer.pool in FITTED_POOLS and buffer not in operation.reads:
                    extents[buffer.whole] = max(extents[buffer.whole], 1, _content_bytes(operation, buffer, shape))
    return dict(extents)


def fit_pools(pools: Mapping[str, Pool], extents: Mapping[Buffer, int]) -> dict[str, Pool]:
    """The pools with each slot of :data:`FITTED_POOLS` as large as what comes into it."""
    return {
        name: replace(
            pool, slot_bytes=tuple(extents.get(Buffer(name, slot), 0) for slot in range(len(pool.slot_bytes)))
        )
        if name in FITTED_POOLS
        else pool
        for name, pool in pools.items()
    }


def _content_bytes(operation: Operation, buffer: Buffer, shape: StepShape) -> int:
    """Size of what an operation fills a slot with: all of a unit's, even if it brings a chunk at a time."""
    if operation.unit is None:
        raise ValueError(f"{operation} fills {buffer} and names no unit")
    unit = shape.units[operation.unit]
    if buffer.pool in _WEIGHTS:
        return unit.weight_bytes
    if buffer.pool in _GRADIENTS:
        return unit.gradient_bytes
    if operation.chunk is None:
        raise ValueError(f"{operation} fills {buffer} and names no chunk")
    return int(getattr(unit.chunks[operation.chunk], _CHUNKS[buffer.pool]))
