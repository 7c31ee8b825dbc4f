"""A plan made ready to run: memory reserved, schedules built and checked once."""

from collections.abc import Callable, Mapping

from greedysnake.engine.buffers import Buffers
from greedysnake.engine.devices import Device
from greedysnake.engine.executor import Executor
from greedysnake.engine.heap import HeapRoom
from greedysnake.engine.unit_store import scratch_extents, state_key, weights_key
from greedysnake.models.skeleton import Skeleton
from greedysnake.models.streaming import StreamedModel
from greedysnake.optim import AdamW, ChunkUpdater
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.placement import Plan
from greedysnake.schedule import (
    Schedule,
    ScheduleError,
    StepShape,
    build_evaluation,
    build_flush,
    check_schedule,
    slot_extents,
)
from greedysnake.storage import Store


class PreparedPlan:
    """Everything that steps under one plan share.

    Attributes:
        plan: the plan.
        executor: runs its schedules.

    Args:
        plan: what to prepare for.
        model: runs the units.
        store: holds weights and state.
        optimizer: settings of the updates.
        device: where computation runs.
    """

    def __init__(self, plan: Plan, model: StreamedModel, store: Store, *, optimizer: AdamW, device: Device) -> None:
        self.plan = plan
        self._schedules: dict[str, Schedule] = {}
        self._pools = plan.fitted_pools()
        layouts = model.skeleton.layouts
        self.executor = Executor(
            model=model,
            store=store,
            buffers=Buffers(self._pools, device),
            updater=ChunkUpdater(optimizer, max(chunk.elements for layout in layouts for chunk in layout.chunks)),
            choices=plan.choices,
            device=device,
            heap=None if device.separate else HeapRoom(sum(plan.host_bytes.values()), plan.host_bytes["computation"]),
        )
        self.executor.fill_residents()

    def serves(self, batch: BatchShape) -> bool:
        """Whether a batch fits what was reserved."""
        own = self.plan.batch
        return own.micro_batches == batch.micro_batches and own.rows >= batch.rows and own.tokens >= batch.tokens

    def step_schedule(self, *, pending: bool, snapshot: bool) -> Schedule:
        """A step's operations.

        Args:
            pending: whether it comes after a step that left delayed updates.
            snapshot: whether the state after that step is committed on the way.
        """
        return self._once(f"step, {pending=}, {snapshot=}", lambda: self.plan.build(pending=pending, snapshot=snapshot))

    def flush_schedule(self) -> Schedule:
        """Delayed updates alone."""
        return self._once("flush", lambda: build_flush(self.plan.shape, self.plan.choices))

    def evaluation_schedule(self, micro_batches: int) -> Schedule:
        """Losses of so many micro-batches."""
        shape = self.plan.shape
        evaluated = StepShape(
            units=shape.units, micro_batches=micro_batches, boundary_bytes=shape.boundary_bytes, tied=shape.tied
        )
        return self._once(f"evaluation, {micro_batches=}", lambda: build_evaluation(evaluated, self.plan.choices))

    def _once(self, name: str, build: Callable[[], Schedule]) -> Schedule:
        if name not in self._schedules:
            self._schedules[name] = built = build()
            check_schedule(built)
            for buffer, size in slot_extents([built], self.plan.shape).items():
                reserved = self._pools[buffer.pool].slot_bytes[buffer.slot]
                if size > reserved:
                    raise ScheduleError(f"{name} needs {size} bytes of {buffer}, and {reserved} are reserved")
        return self._schedules[name]

    def leaves_delayed(self) -> bool:
        """Whether a step leaves updates for the next one."""
        return any(self.plan.choices.delayed_chunks(sizes) for sizes in self.plan.shape.units)

    def prompt_keys(self) -> list[str]:
        """The store's keys of what a step's own updates have written before its norm was known."""
        if self.plan.choices.wait_for_norm:
            return []
        return [
            key(unit, chunk)
            for key in (weights_key, state_key)
            for unit, sizes in enumerate(self.plan.shape.units)
            for chunk in self.plan.choices.prompt_chunks(sizes)
        ]


def scratch_of(plan: Plan, skeleton: Skeleton) -> Mapping[str, int]:
    """The scratch extents that a plan's schedules use, bytes by key."""
    return scratch_extents(skeleton.layouts, plan.build(pending=True), plan.batch.micro_batches)
