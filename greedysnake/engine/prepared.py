"""A plan made ready to run: memory reserved, schedules built and checked once."""

from collections.abc import Mapping

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
from greedysnake.schedule import Schedule, ScheduleError, check_schedule, slot_extents
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
        self._pools = plan.schedules.fitted_pools()
        self._checked: set[int] = set()
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
        return self._checked_once(self.plan.schedules.step(pending=pending, snapshot=snapshot))

    def flush_schedule(self) -> Schedule:
        """Delayed updates alone."""
        return self._checked_once(self.plan.schedules.flush())

    def evaluation_schedule(self, micro_batches: int) -> Schedule:
        """Losses of so many micro-batches."""
        return self._checked_once(self.plan.schedules.evaluation(micro_batches))

    def _checked_once(self, schedule: Schedule) -> Schedule:
        """The schedule, which is safe and has its memory."""
        if id(schedule) not in self._checked:  # the plan keeps it, so its id stays its own
            check_schedule(schedule)
            for buffer, size in slot_extents([schedule], self.plan.shape).items():
                reserved = self._pools[buffer.pool].slot_bytes[buffer.slot]
                if size > reserved:
                    raise ScheduleError(f"{schedule.name} needs {size} bytes of {buffer}; {reserved} are reserved")
            self._checked.add(id(schedule))
        return schedule

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
    return scratch_extents(skeleton.layouts, plan.schedules.step(pending=True))
