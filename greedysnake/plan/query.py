"""What a person asks of the planner, and one way in which a step could be done."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.costs import StepCosts
from greedysnake.plan.hardware import Hardware
from greedysnake.plan.memory import PROCESS_BYTES, Needs, step_needs
from greedysnake.plan.program import Limits
from greedysnake.plan.simulate import Simulation, simulate
from greedysnake.plan.step_costs import costs_one_by_one, least_seconds, step_costs
from greedysnake.plan.workload import Workload
from greedysnake.schedule import BUILDERS, Choices, Schedule, StepShape, Tier, one_by_one

SIMULATED_CHUNKS = 1600
"""Optimizer chunks of all units that a simulated step has at most; larger models' chunks go in bundles."""


@dataclass(frozen=True, kw_only=True)
class PlanQuery:
    """A model, a machine, a batch, and what of the plan is fixed by hand; None leaves it to the planner.

    Attributes:
        workload: the model.
        hardware: the machine.
        tokens: of a sequence, T.
        sequences: in a step; None: the fewest that come close to what any number could reach.
        micro_batches: M.
        rows: sequences of a micro-batch, B.
        layers_per_unit: decoder layers loaded and computed as one.
        group_size: micro-batches that go through the units together, before the next ones begin.
        delayed_share: α.
        boundaries_on_device, boundaries_on_ssd: shares of the boundaries that wait there; the rest is in host memory.
        kept_activations: share of the activations that are kept for the backward instead of being recomputed.
        gradients: tier of those that wait for their update.
        resident_weights, resident_state: shares that stay in host memory.
        clipping: whether the gradient's norm is limited, so that updates wait for it.
        can_take_back: whether what a step wrote can be taken back while its norm is not known; if not, updates wait
            for the norm without clipping too.
        snapshot_every: steps between snapshots, each of which writes what stays in host memory; None: not counted.
        split_master: whether a 16-bit weight is the upper half of its master.
        eight_bit_moments: whether moments have 8 bits; this engine's have 32.
        second_slot: whether the disks hold what is committed beside what is written.
        schedule: order of units and micro-batches.
        overlap: whether operations of different resources run at the same time.
        mask_bytes: attention masks that a micro-batch keeps while it waits.
        process_bytes: of host memory, taken by the process itself.
    """

    workload: Workload
    hardware: Hardware
    tokens: int
    sequences: int | None = None
    micro_batches: int | None = None
    rows: int | None = None
    layers_per_unit: int | None = None
    group_size: int | None = None
    delayed_share: float | None = None
    boundaries_on_device: float | None = None
    boundaries_on_ssd: float | None = None
    kept_activations: float | None = None
    gradients: Tier | None = None
    resident_weights: float | None = None
    resident_state: float | None = None
    clipping: bool = True
    can_take_back: bool = True
    snapshot_every: int | None = None
    split_master: bool = True
    eight_bit_moments: bool = False
    second_slot: bool = True
    schedule: str = "vertical"
    overlap: bool = True
    mask_bytes: int = 0
    process_bytes: int = PROCESS_BYTES

    def waits_for_norm(self, delayed_share: float) -> bool:
        """Whether no update may be made before the whole gradient's norm is known."""
        return delayed_share < 1 and (self.clipping or not self.can_take_back)

    def step_shape(self, batch: BatchShape, *, layers_per_unit: int = 1, chunks_per_unit: int = 16) -> StepShape:
        """Sizes of a schedule (:meth:`~greedysnake.plan.workload.Workload.step_shape`), with this state."""
        return self.workload.step_shape(
            batch,
            layers_per_unit=layers_per_unit,
            chunks_per_unit=chunks_per_unit,
            split_master=self.split_master,
            eight_bit_moments=self.eight_bit_moments,
        )

    @property
    def limits(self) -> Limits:
        """What the plan may take."""
        machine = self.hardware
        return Limits(host=machine.host_memory, device=machine.device_memory, disk=machine.disk_capacity)


def group_sizes(query: PlanQuery, batch: BatchShape) -> list[int | None]:
    """Ways to cut a batch into groups of micro-batches, None for a single one.

    Where the batch is free, it is as large as one group should be.
    """
    count = batch.micro_batches
    if query.group_size is not None:
        return [query.group_size if query.group_size < count else None]
    if query.sequences is None and query.micro_batches is None:
        return [None]
    return [None, *smaller_groups(count)]


def smaller_groups(count: int) -> list[int]:
    """Sizes of groups smaller than ``count``, each about half of the one before, down to 1."""
    return [] if count == 1 else [ceil(count / 2), *smaller_groups(ceil(count / 2))]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch, a unit size and the choices of a schedule: all that it takes to build and simulate a step."""

    batch: BatchShape
    layers_per_unit: int
    choices: Choices

    def shape(self, query: PlanQuery) -> StepShape:
        """Sizes of its schedule."""
        units = -(-query.workload.layers // self.layers_per_unit) + 2
        return query.step_shape(
            self.batch,
            layers_per_unit=self.layers_per_unit,
            chunks_per_unit=max(8, SIMULATED_CHUNKS // units),
        )

    def needs(self, query: PlanQuery) -> Needs:
        """Memory and disk that it takes."""
        return step_needs(
            query.workload,
            self.shape(query),
            self.choices,
            computing=self.computing_bytes(query),
            slots=2 if query.second_slot else 1,
            schedule=query.schedule,
            process=query.process_bytes,
        )

    def computing_bytes(self, query: PlanQuery) -> int:
        """Memory that torch needs besides the schedule's buffers: only a group's micro-batches are there at a time."""
        group = replace(
            self.batch, micro_batches=min(self.choices.group_size or self.batch.micro_batches, self.batch.micro_batches)
        )
        return query.workload.computing_bytes(
            group, layers_per_unit=self.layers_per_unit, separate_device=self.choices.separate_device
        )

    def costs(self, query: PlanQuery) -> StepCosts:
        """Costs of its operations."""
        costs = step_costs(query.hardware, query.workload, self.batch, layers_per_unit=self.layers_per_unit)
        return costs if query.overlap else costs_one_by_one(costs)

    def with_choices(self, **changes: object) -> "Case":
        """The same with some choices changed."""
        return replace(self, choices=replace(self.choices, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A case that fits, simulated.

    Attributes:
        case: what was simulated.
        step: a step in the middle of a run, with updates pending from the one before.
        least_seconds: the roofline of its operations.
        snapshot_seconds: of a step's share of the next snapshot, which writes what stays in host memory.
        snapshot_bytes: written for a step's share of it.
    """

    case: Case
    step: Simulation
    least_seconds: float
    snapshot_seconds: float = 0.0
    snapshot_bytes: float = 0.0

    @property
    def mean_seconds(self) -> float:
        """Seconds of a step, its share of a snapshot included."""
        return self.step.seconds + self.snapshot_seconds

    @property
    def mean_written_bytes(self) -> float:
        """Bytes that a step writes to the disks, its share of a snapshot included."""
        return self.step.ssd_written_bytes + self.snapshot_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step by its seconds, snapshots included."""
        batch = self.case.batch
        return batch.micro_batches * batch.rows * batch.tokens / self.mean_seconds


def fits(needs: Needs, limits: Limits) -> bool:
    """Whether everything has its place."""
    return not over(needs, limits)


def over(needs: Needs, limits: Limits) -> dict[Tier, int]:
    """Bytes by which needs exceed limits, for each tier in which they do."""
    allowed = {Tier.HOST: limits.host, Tier.DEVICE: limits.device, Tier.SSD: limits.disk}
    return {
        tier: needs.total(tier) - limit
        for tier, limit in allowed.items()
        if limit is not None and needs.total(tier) > limit
    }


Build = Callable[[Case, bool], Schedule]
"""Makes a case's schedule, with a snapshot or without."""


def builder(query: PlanQuery, known: Candidate | None = None) -> Build:
    """Makes schedules of cases of ``query``, and of queries that differ in the machine alone, each once.

    Args:
        query: what is asked.
        known: a case whose schedule, without a snapshot, was made before.
    """

    @cache
    def build(case: Case, snapshot: bool) -> Schedule:
        if known is not None and case == known.case and not snapshot:
            return known.step.schedule
        shape, choices = case.shape(query), case.choices
        schedule = BUILDERS[query.schedule](shape, choices, pending=choices.delayed_share > 0, snapshot=snapshot)
        return schedule if query.overlap else one_by_one(schedule)

    return build


def simulate_case(case: Case, query: PlanQuery) -> Candidate:
    """Build the case's schedule and run it on the query's machine, snapshots included."""
    build = builder(query)
    return with_snapshots(simulate_plain(case, query, build), query, build)


def simulate_plain(case: Case, query: PlanQuery, build: Build) -> Candidate:
    """The same without snapshots: the case is no faster with them."""
    shape, costs, schedule = case.shape(query), case.costs(query), build(case, False)
    return Candidate(
        case=case,
        step=simulate(schedule, shape, costs),
        least_seconds=least_seconds(schedule, shape, costs),
    )


def with_snapshots(candidate: Candidate, query: PlanQuery, build: Build) -> Candidate:
    """The candidate with a step's share of a snapshot: a step in which one is taken is simulated too."""
    case, choices = candidate.case, candidate.case.choices
    if query.snapshot_every is None or not (choices.resident_weights or choices.resident_state):
        return candidate
    other, usual = simulate(build(case, True), case.shape(query), case.costs(query)), candidate.step
    return replace(
        candidate,
        snapshot_seconds=max(0.0, other.seconds - usual.seconds) / query.snapshot_every,
        snapshot_bytes=(other.ssd_written_bytes - usual.ssd_written_bytes) / query.snapshot_every,
    )
