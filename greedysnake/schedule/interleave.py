"""Updates that make way for boundaries: what the backward needs first is read first.

A unit's updates are due when its gradient is complete, so a builder appends the reads of their state before those of
the next unit's boundaries. Where boundaries come from SSD, computation would wait behind that state, which nobody needs
so soon. Here a unit's updates are spread over the micro-batches of the next unit instead, as far as what depends on
them allows. Nothing else changes: the operations are the same, and so is what each waits for.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from greedysnake.schedule.operations import Kind, Operation

_FEW_MICRO_BATCHES = 4
"""So many boundaries have buffers to come through: they need not wait for each other, and pass as it is."""
_UPDATE_KINDS = frozenset({Kind.LOAD_STATE, Kind.UPDATE, Kind.STORE_STATE})


def let_boundaries_pass(operations: Sequence[Operation], micro_batches: int) -> tuple[Operation, ...]:
    """The operations of a vertical step, a unit's updates behind the backward spread over the next unit's backward.

    Args:
        operations: in an order in which each comes after those that it waits for; so is what is returned.
        micro_batches: of a group, the backwards of a unit in the last of which it is updated.
    """
    loads = any(operation.kind == Kind.LOAD_BOUNDARY for operation in operations)
    if not loads or micro_batches <= _FEW_MICRO_BATCHES:
        return tuple(operations)
    begin = next(operation.index for operation in operations if operation.kind == Kind.HEAD)
    found: list[Operation] = list(operations[:begin])
    waiting: deque[Operation] = deque()
    waiting_indices: set[int] = set()
    at_once = 0  # of those that wait, after each backward

    def emit_waiting(count: int) -> None:
        for _ in range(min(count, len(waiting))):
            operation = waiting.popleft()
            waiting_indices.discard(operation.index)
            found.append(operation)

    for operation in operations[begin:]:
        if operation.kind in _UPDATE_KINDS:
            waiting.append(operation)
            waiting_indices.add(operation.index)
            at_once = -(-len(waiting) // micro_batches)
            continue
        while not waiting_indices.isdisjoint(operation.after):
            emit_waiting(1)
        found.append(operation)
        if operation.kind == Kind.BACKWARD:
            emit_waiting(at_once)
    emit_waiting(len(waiting))
    return _renumbered(found, begin)


def _renumbered(operations: Sequence[Operation], begin: int) -> tuple[Operation, ...]:
    """The operations with their place in the list as their index; those before ``begin`` have it already."""
    place = [0] * len(operations)
    for number, operation in enumerate(operations):
        place[operation.index] = number
    return (
        *operations[:begin],
        *(
            replace(operation, index=number, after=tuple(sorted([place[earlier] for earlier in operation.after])))
            for number, operation in enumerate(operations[begin:], begin)
        ),
    )
