"""A run's model, store and device at work: plans made ready for batches, and schedules carried out."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import torch

from greedysnake.engine.batches import check_micro_batches, target_tokens
from greedysnake.engine.devices import Device
from greedysnake.engine.prepared import PreparedPlan, scratch_of
from greedysnake.engine.work import StepWork
from greedysnake.errors import MemoryBudgetError
from greedysnake.models.streaming import MicroBatch, StreamedModel
from greedysnake.optim import AdamW, UpdateScalars
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.placement import Plan, make_plan
from greedysnake.plan.request import PlanRequest
from greedysnake.report.events import OperationEvent
from greedysnake.schedule import Resource, Schedule
from greedysnake.storage import Store

_UNPLANNED_AT_ONCE = 8  # micro-batches to plan for where a loss is asked for before any batch is known


class Runner:
    """Carries out the schedules of one run.

    Attributes:
        model: runs the units.
        store: holds weights and state.
        prepared: what is ready to run; None before the first batch is known.
        delayed: scalars of the updates that the last step left for the next one; None if it left none.
        groups: micro-batches that go through the units together, as planned, by the number of those in a step; what
            was planned once stays, as it decides the order of additions.
        usable: whether weights and state are those of a whole step, and the store is open.

    Args:
        model: of the run.
        store: filled with it.
        device: where computation runs; closed with the runner.
        optimizer: settings of the updates.
        request: what plans are asked for.
    """

    def __init__(
        self, model: StreamedModel, store: Store, device: Device, *, optimizer: AdamW, request: PlanRequest
    ) -> None:
        self.model = model
        self.store = store
        self.prepared: PreparedPlan | None = None
        self.delayed: UpdateScalars | None = None
        self.usable = True
        self.groups: dict[int, int] = {}
        self._device = device
        self._optimizer = optimizer
        self._request = request

    def check_usable(self) -> None:
        """Refuse to go on after what left weights and state of no whole step."""
        if not self.usable:
            raise RuntimeError("the trainer is closed, or a step was broken off; what the last commit holds is kept")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around what changes the run: whatever breaks it off leaves the runner unusable and the last commit whole."""
        self.usable = False
        yield
        self.usable = True

    # Made ready

    def prepare(self, batch: BatchShape) -> PreparedPlan:
        """What is ready for a batch: what there is, if the batch fits it.

        Raises:
            MemoryBudgetError, StorageError: it does not fit.
        """
        before = self.prepared
        if before is not None:
            if before.serves(batch):
                return before
            own = before.plan.batch
            batch = replace(batch, rows=max(batch.rows, own.rows), tokens=max(batch.tokens, own.tokens))
            self.flush()
            self.store_residents()
            self.prepared = before = None  # its memory is free for the new plan
        self._device.release_host()
        plan = self._plan(batch)
        self.store.reserve_scratch(scratch_of(plan, self.model.skeleton))
        return self.reserve(plan)

    def _plan(self, batch: BatchShape) -> Plan:
        """A plan with the groups that were planned before for so many micro-batches, if they fit."""
        skeleton, request, known = self.model.skeleton, self._request, self.groups.get(batch.micro_batches)
        if request.group_size is None and known is not None:
            try:
                return make_plan(skeleton, batch, replace(request, group_size=known))
            except MemoryBudgetError:
                pass  # longer sequences, or less memory than there was: rather other rounding than none
        return make_plan(skeleton, batch, request)

    def reserve(self, plan: Plan) -> PreparedPlan:
        """Memory for everything that the plan's schedules need."""
        if self._request.group_size is None and self._request.schedule == "vertical":
            self.groups[plan.batch.micro_batches] = plan.choices.together(plan.shape)
        self.prepared = PreparedPlan(plan, self.model, self.store, optimizer=self._optimizer, device=self._device)
        return self.prepared

    def store_residents(self) -> None:
        """Write what stays in host memory to the store, so that the store is complete."""
        if self.prepared is not None:
            self.prepared.executor.store_residents()

    # Carried out

    def run(self, prepared: PreparedPlan, schedule: Schedule, work: StepWork) -> list[OperationEvent]:
        """Carry out a schedule, within :meth:`changing` if it changes the run; the model drops what is broken off."""
        try:
            with torch.random.fork_rng(devices=[]):
                return prepared.executor.run(schedule, work)
        except BaseException:
            self.model.abandon()
            raise

    def flush(self) -> None:
        """Apply delayed updates now, if there are any."""
        if self.delayed is None or self.prepared is None:
            return
        work = StepWork(prompt=self.delayed, delayed=self.delayed)
        with self.changing():
            self.run(self.prepared, self.prepared.flush_schedule(), work)
            self.delayed = None

    def mean_loss(self, micro_batches: Iterable[MicroBatch], *, at_once: int | None, step: int) -> float:
        """Mean loss over all target tokens of micro-batches, some at once brought through the model together.

        Args:
            micro_batches: each with ``input_ids`` and ``labels``, int64 [B, T].
            at_once: how many; None: as many as the plan has counted memory for.
            step: steps done.
        """
        total, tokens, rest = 0.0, 0, iter(micro_batches)
        while ahead := list(islice(rest, at_once or self._planned_at_once())):
            self._prepare_forward(ahead)
            size = at_once or self._planned_at_once()
            for begin in range(0, len(ahead), size):
                group = ahead[begin : begin + size]
                total += self._summed_loss(group, step)
                tokens += target_tokens(group)
        if not tokens:
            return float("nan")
        return total / tokens

    def _planned_at_once(self) -> int:
        if self.prepared is None:
            return _UNPLANNED_AT_ONCE
        plan = self.prepared.plan
        return plan.choices.together(plan.shape)

    def _prepare_forward(self, group: Sequence[MicroBatch]) -> PreparedPlan:
        """What is prepared, else for micro-batches without a step: the groups of a step are not theirs to decide."""
        batch = check_micro_batches(group, self.model.skeleton.model.config)
        if self.prepared is not None:
            return self.prepared
        before = dict(self.groups)
        prepared = self.prepare(batch)
        self.groups = before
        return prepared

    def _summed_loss(self, group: Sequence[MicroBatch], step: int) -> float:
        """Summed loss of micro-batches that go through the model together."""
        prepared = self._prepare_forward(group)
        self.flush()
        work = StepWork(prompt=UpdateScalars(lr=0.0, number=0, clip=1.0))
        self.model.begin(
            group,
            step=step,
            target_tokens=1,
            training=False,
            head_chunk_tokens=prepared.plan.head_chunk_tokens,
        )
        with torch.no_grad():
            self.run(prepared, prepared.evaluation_schedule(len(group)), work)
        return sum(loss.item() for loss in work.losses.values())

    def run_forward(self) -> None:
        """Bring the one micro-batch that the model has begun with through it; also broken off, it changes nothing.

        Raises:
            RuntimeError: nothing is prepared.
        """
        if self.prepared is None:
            raise RuntimeError("nothing is prepared to run")
        work = StepWork(prompt=UpdateScalars(lr=0.0, number=0, clip=1.0))
        self.run(self.prepared, self.prepared.evaluation_schedule(1), work)

    def measure(self, micro_batches: Sequence[MicroBatch], resources: Collection[Resource]) -> float:
        """Seconds that a step's operations on some resources take alone; the runner is unusable afterwards."""
        prepared = self.prepare(check_micro_batches(micro_batches, self.model.skeleton.model.config))
        self.usable = False
        scalars = UpdateScalars(lr=0.0, number=1, clip=1.0)
        work = StepWork(prompt=scalars, delayed=scalars, must_be_finite=False)
        self.model.begin(
            micro_batches,
            step=0,
            target_tokens=target_tokens(micro_batches),
            kept_bytes=prepared.plan.shape.kept_bytes,
            head_chunk_tokens=prepared.plan.head_chunk_tokens,
        )
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            schedule = prepared.step_schedule(pending=True, snapshot=False)
            prepared.executor.run(schedule, work, only=resources)
        return time.perf_counter() - start

    def close(self) -> None:
        """Free model, store and device; what is not committed is lost."""
        self.usable = False
        try:
            self.model.close()
        finally:
            self.store.close()
            self._device.close()
