"""A training step as data: operations, what they need, and proof that they are safe."""

from greedysnake.schedule.builders import (
    BUILDERS,
    build_evaluation,
    build_flush,
    build_horizontal,
    build_vertical,
    step_pools,
)
from greedysnake.schedule.extents import FITTED_POOLS, fit_pools, slot_extents
from greedysnake.schedule.lives import Life, content_lives
from greedysnake.schedule.one_by_one import one_by_one
from greedysnake.schedule.operations import Buffer, Kind, Operation, Pool, Resource, Schedule, Tier
from greedysnake.schedule.shape import SHARES, Choices, ChunkShape, StepShape, UnitShape
from greedysnake.schedule.validate import Peaks, ScheduleError, check_schedule

__all__ = [
    "BUILDERS",
    "FITTED_POOLS",
    "SHARES",
    "Buffer",
    "Choices",
    "ChunkShape",
    "Kind",
    "Life",
    "Operation",
    "Peaks",
    "Pool",
    "Resource",
    "Schedule",
    "ScheduleError",
    "StepShape",
    "Tier",
    "UnitShape",
    "build_evaluation",
    "build_flush",
    "build_horizontal",
    "build_vertical",
    "check_schedule",
    "content_lives",
    "fit_pools",
    "one_by_one",
    "slot_extents",
    "step_pools",
]
