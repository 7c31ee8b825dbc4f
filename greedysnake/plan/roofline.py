"""The roofline of training from SSD: tokens per second for several batches, under what computation and I/O allow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.baselines import LOW_BYTES, build_baseline, untied
from greedysnake.plan.placer import Placer
from greedysnake.plan.query import Candidate, Case, PlanQuery, group_sizes, simulate_case
from greedysnake.plan.search import compute_roof
from greedysnake.plan.simulate import simulate
from greedysnake.plan.slots import NARROW, with_slots
from greedysnake.plan.step_costs import least_shared, step_costs
from greedysnake.schedule import Choices

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_ALPHAS = (0.0, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class RooflinePoint:
    """One batch size.

    Attributes:
        sequences: in a step.
        ours: tokens per second of the best simulated plan; None if none fits.
        ideal: of the operations of that plan in the best order that there could be.
        baseline: of ZeRO-Infinity's order.
        baseline_fits: whether its sums of gradients, a micro-batch's boundaries and buffers fit in host memory.
        compute_roof: if a step were computation alone, all activations recomputed.
        io_roof: if it were the optimizer's state and two loads of the weights alone, nothing kept in host memory.
    """

    sequences: int
    ours: float | None
    ideal: float | None
    baseline: float
    baseline_fits: bool
    compute_roof: float
    io_roof: float


def roofline_points(query: PlanQuery, rows: int, micro_batches: Sequence[int] = _MICRO_BATCHES) -> list[RooflinePoint]:
    """Simulate a model on a machine for several batch sizes.

    Args:
        query: model and machine.
        rows: sequences of a micro-batch.
        micro_batches: numbers of them.
    """
    points = []
    for count in micro_batches:
        batch = BatchShape(micro_batches=count, rows=rows, tokens=query.tokens)
        tokens = count * rows * query.tokens
        best = best_of_few(query, batch)
        points.append(
            RooflinePoint(
                sequences=count * rows,
                ours=None if best is None else best.tokens_per_second,
                ideal=None if best is None else tokens / best.least_seconds,
                baseline=tokens / baseline_seconds(query, batch),
                baseline_fits=baseline_room(query, batch) >= 0,
                compute_roof=compute_roof(query, batch),
                io_roof=tokens / io_seconds(query, batch),
            )
        )
    return points


def best_of_few(query: PlanQuery, batch: BatchShape) -> Candidate | None:
    """The best of a few placements of a batch, in groups of micro-batches as large as fit; None if none fits."""
    placer = Placer(query)
    alphas = _ALPHAS if query.delayed_share is None else (query.delayed_share,)
    for size in group_sizes(replace(query, micro_batches=batch.micro_batches), batch):
        cases = [case for alpha in alphas for case in placer.likely(batch, alpha, query.layers_per_unit or 1, size)]
        if cases:
            found = [simulate_case(case, query) for case in cases]
            return max(found, key=lambda candidate: candidate.tokens_per_second)
    return None


def io_seconds(query: PlanQuery, batch: BatchShape) -> float:
    """Least time of a step's traffic with the disks with nothing resident: 26 bytes a parameter in 16 bits."""
    shape = query.step_shape(batch, chunks_per_unit=1)
    disk = query.hardware.disk_rates
    weights = sum(unit.weight_bytes for unit in shape.units)
    state = sum(chunk.state_bytes for unit in shape.units for chunk in unit.chunks)
    return least_shared(
        (2 * weights + state) / disk.read,
        (weights + state) / disk.write,
        disk.mixed_read / disk.read,
        disk.mixed_write / disk.write,
    )


def baseline_seconds(query: PlanQuery, batch: BatchShape, *, resident_weights: float | None = None) -> float:
    """Seconds of a step in ZeRO-Infinity's order, with as many weights in host memory as fit beside its gradients.

    Args:
        query: model and machine.
        batch: sizes of the step.
        resident_weights: that share instead.
    """
    shape = untied(query.workload.step_shape(batch, chunks_per_unit=16, split_master=False))
    if resident_weights is None:
        resident_weights = baseline_residents(query, batch)
    schedule = build_baseline(shape, resident_weights=resident_weights)
    return simulate(schedule, shape, step_costs(query.hardware, query.workload, batch)).seconds


def baseline_residents(query: PlanQuery, batch: BatchShape) -> float:
    """The share of weights that fits in host memory beside the baseline's 16-bit gradients and its buffers."""
    return max(0.0, min(1.0, baseline_room(query, batch) / _low_bytes(query)))


def baseline_room(query: PlanQuery, batch: BatchShape) -> float:
    """Bytes of host memory that the baseline's 16-bit gradients and its buffers leave; below 0 it does not fit."""
    choices = with_slots(Choices(separate_device=query.hardware.separate_device, boundaries_on_ssd=1.0), NARROW)
    buffers = sum(Case(batch=batch, layers_per_unit=1, choices=choices).needs(query).host.values())
    boundaries = (len(query.workload.parts) - 1) * query.workload.boundary_bytes(batch)
    return query.hardware.host_memory - buffers - boundaries - _low_bytes(query)


def _low_bytes(query: PlanQuery) -> float:
    """Bytes of all that is trained in 16 bits: the baseline's weights, or its sums of gradients."""
    return LOW_BYTES * sum(part.gradient_bytes for part in query.workload.parts) / 4


def on_other_machine(query: PlanQuery, **changes: float) -> PlanQuery:
    """The query on a machine with other figures: ``host_memory`` in bytes, ``disks`` as a factor on all rates."""
    machine = query.hardware
    if "disks" in changes:
        names = ("read", "write", "mixed_read", "mixed_write")
        factor = changes["disks"]
        disks = tuple(
            disk.model_copy(update={name: factor * getattr(disk, name) for name in names}) for disk in machine.disks
        )
        machine = machine.model_copy(update={"disks": disks, "together": None})
    if "host_memory" in changes:
        machine = machine.model_copy(update={"host_memory": int(changes["host_memory"])})
    return replace(query, hardware=machine)
