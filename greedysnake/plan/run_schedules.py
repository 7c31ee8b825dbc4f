"""The schedules of a run under one plan, each built once however often it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from greedysnake.schedule import (
    BUILDERS,
    Choices,
    Pool,
    Schedule,
    StepShape,
    build_evaluation,
    build_flush,
    fit_pools,
    slot_extents,
)


@dataclass(frozen=True, kw_only=True)
class RunSchedules:
    """Everything that a run does with a batch of one shape.

    Attributes:
        name: of the order of units and micro-batches in a step.
        shape, choices: what the schedules are built from.
    """

    name: str
    shape: StepShape
    choices: Choices
    _built: dict[str, Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step(self, *, pending: bool, snapshot: bool = False) -> Schedule:
        """A step; ``pending`` and ``snapshot`` as the builders have it."""
        build = BUILDERS[self.name]
        return self._once(
            f"step, {pending=}, {snapshot=}",
            lambda: build(self.shape, self.choices, pending=pending, snapshot=snapshot),
        )

    def flush(self) -> Schedule:
        """Delayed updates alone."""
        return self._once("flush", lambda: build_flush(self.shape, self.choices))

    def evaluation(self, micro_batches: int) -> Schedule:
        """Losses of so many micro-batches."""
        shape = replace(self.shape, micro_batches=micro_batches, kept_bytes=0)
        return self._once(f"evaluation, {micro_batches=}", lambda: build_evaluation(shape, self.choices))

    def fitted_pools(self) -> dict[str, Pool]:
        """The memory of all of them, each slot as large as what any brings into it."""
        steps = [self.step(pending=pending) for pending in (True, False)]  # a snapshot fills no slots
        schedules = [*steps, self.flush(), self.evaluation(self.choices.together(self.shape))]
        return fit_pools(steps[0].pools, slot_extents(schedules, self.shape))

    def _once(self, name: str, build: Callable[[], Schedule]) -> Schedule:
        if name not in self._built:
            self._built[name] = build()
        return self._built[name]
