"""A schedule without overlap, for comparison."""

from dataclasses import replace

from greedysnake.schedule.operations import Schedule


def one_by_one(schedule: Schedule) -> Schedule:
    """The same operations, each on its own resource and only when the one before it has ended."""
    operations = tuple(
        replace(operation, after=(operation.index - 1,) if operation.index else ()) for operation in schedule.operations
    )
    return replace(schedule, operations=operations)
