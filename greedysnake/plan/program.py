"""What goes where, as a linear program: for a fixed batch, α and unit size, the shares that make a step shortest.

A step has a forward and a backward phase and, where updates wait for the gradient's norm, an end in which they
run alone. Each phase is at least as long as the work of each resource in it; reads and writes share the disks,
computation and optimizer the cores, each as a mixture of times in which one or both are busy. Filling and
draining of the pipeline are left out: the simulator knows them, and decides between plans.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from greedysnake.plan.costs import StepCosts
from greedysnake.plan.memory import Needs
from greedysnake.schedule import StepShape, Tier

_SHARES = (
    "resident_weights",
    "resident_state",
    "boundaries_device",
    "boundaries_host",
    "gradients_host",
    "kept_activations",
)
_PHASES = ("forward", "backward", "end")
_SLICES = ("disk_read", "disk_write", "disk_both", "compute", "cpu", "both", "length")
_VARIABLES = (*_SHARES, *(f"{phase}.{part}" for phase in _PHASES for part in _SLICES))
_INDEX = {name: number for number, name in enumerate(_VARIABLES)}
_TIE_BREAK = 1e-4
"""Weight of disk time in the objective: among plans of one length, the one that moves the fewest bytes."""


class Expression:
    """A constant and coefficients of variables."""

    def __init__(self, constant: float = 0.0, **coefficients: float) -> None:
        self.constant = constant
        self.coefficients = coefficients

    def __add__(self, other: "Expression") -> "Expression":
        merged = dict(self.coefficients)
        for name, value in other.coefficients.items():
            merged[name] = merged.get(name, 0.0) + value
        return Expression(self.constant + other.constant, **merged)

    def __mul__(self, factor: float) -> "Expression":
        return Expression(self.constant * factor, **{name: value * factor for name, value in self.coefficients.items()})

    def at(self, shares: dict[str, float]) -> float:
        """Its value for given shares."""
        return self.constant + sum(value * shares[name] for name, value in self.coefficients.items())


@dataclass(frozen=True, kw_only=True)
class PhaseWork:
    """What happens in a phase, as expressions of the shares.

    Attributes:
        ssd_read, ssd_write, h2d, d2h: bytes.
        compute, cpu: seconds, each alone.
    """

    ssd_read: Expression
    ssd_write: Expression
    h2d: Expression
    d2h: Expression
    compute: Expression
    cpu: Expression


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes that a plan may take."""

    host: int
    device: int | None
    disk: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A solution: shares that stay in each tier, and the seconds that the phases take at least."""

    resident_weights: float
    resident_state: float
    boundaries_device: float
    boundaries_host: float
    gradients_host: float
    kept_activations: float
    seconds: float

    def shares(self) -> dict[str, float]:
        """The shares by name."""
        return {name: getattr(self, name) for name in _SHARES}


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sizes of a step, summed over its units.

    Attributes:
        weights, state, gradients: bytes of what is trained.
        all_weights: bytes, frozen ones included.
        forward_weights, backward_weights: bytes of weights that the phases need in host memory.
        copied_weights: bytes of weights that computation in the backward phase needs.
        boundaries: bytes that are kept from forward to backward.
        kept: bytes of all activations inside of decoder units, if none are recomputed.
    """

    weights: float
    all_weights: float
    state: float
    gradients: float
    forward_weights: float
    backward_weights: float
    copied_weights: float
    boundaries: float
    kept: float


def step_totals(shape: StepShape, *, updates_in_backward: bool) -> StepTotals:
    """Sum up a step's sizes.

    Args:
        shape: of the step.
        updates_in_backward: whether the backward phase updates anything, and so needs every unit's weights.
    """
    head = len(shape.units) - 1
    chunks = [chunk for unit in shape.units for chunk in unit.chunks]
    passed = shape.units[shape.first_trained : head]  # what the backward comes through
    again = [unit for unit in passed if unit.backward_needs_weights or (updates_in_backward and unit.chunks)]
    computed = [unit for unit in passed if unit.backward_needs_weights]
    at_head = shape.units[head].weight_bytes + (shape.units[0].weight_bytes if shape.tied else 0)
    return StepTotals(
        weights=sum(chunk.weight_bytes for chunk in chunks),
        all_weights=sum(unit.weight_bytes for unit in shape.units),
        state=sum(chunk.state_bytes for chunk in chunks),
        gradients=sum(chunk.gradient_bytes for chunk in chunks),
        forward_weights=sum(unit.weight_bytes for unit in shape.units[:head]),
        backward_weights=sum(unit.weight_bytes for unit in again) + at_head,
        copied_weights=sum(unit.weight_bytes for unit in computed) + at_head,
        boundaries=max(0, head - max(1, shape.first_trained)) * shape.micro_batches * shape.boundary_bytes,
        kept=len(shape.keepers) * shape.micro_batches * shape.kept_bytes,
    )


def phase_work(
    shape: StepShape,
    costs: StepCosts,
    *,
    delayed_share: float,
    wait_for_norm: bool,
    separate_device: bool,
    snapshots: float = 0.0,
) -> dict[str, PhaseWork]:
    """The work of each phase of a vertical step.

    Args:
        shape: of the step.
        costs: of its operations.
        delayed_share, wait_for_norm, separate_device: of the plan.
        snapshots: taken in a step, on average: what stays in host memory is written for each, in the forward.
    """
    alpha, prompt = delayed_share, 1 - delayed_share
    in_backward = 0.0 if wait_for_norm else prompt
    at_end = prompt if wait_for_norm else 0.0
    held = 1.0 if wait_for_norm else alpha
    sizes = step_totals(shape, updates_in_backward=in_backward > 0)
    parameters = sizes.gradients / 4
    on_ssd = Expression(1.0, boundaries_device=-1.0, boundaries_host=-1.0) * sizes.boundaries
    leaving = Expression(1.0, boundaries_device=-1.0) * sizes.boundaries
    none = Expression()
    read_weights = Expression(1.0, resident_weights=-1.0)
    read_state = Expression(1.0, resident_state=-1.0) * sizes.state
    gradients_on_ssd = Expression(1.0, gradients_host=-1.0) * sizes.gradients
    gradients_in_host = Expression(gradients_host=1.0) * sizes.gradients
    seconds, keepers = costs.units, [costs.units[unit] for unit in shape.keepers]
    micro_batches = shape.micro_batches
    resident = Expression(resident_weights=sizes.weights, resident_state=sizes.state)

    def moved(away: Expression) -> Expression:
        """Copies of boundaries on the host, where the device has no memory of its own."""
        return none if separate_device else away * (1 / costs.copy)

    def update(share: float) -> tuple[Expression, Expression, Expression]:
        """Reads, writes and seconds of the updates of a share of all chunks, their gradients' reads left out."""
        state = read_state * share
        return state, state + read_weights * (share * sizes.weights), Expression(share * parameters / costs.optimizer)

    reads, writes, updates = update(alpha)
    forward = PhaseWork(
        ssd_read=read_weights * sizes.forward_weights + reads + gradients_on_ssd * alpha,
        ssd_write=writes + on_ssd + resident * snapshots,
        h2d=Expression(sizes.forward_weights) if separate_device else none,
        d2h=leaving if separate_device else none,
        compute=Expression(
            micro_batches * sum(unit.forward for unit in seconds[:-1]),
            kept_activations=micro_batches * sum(unit.forward_if(kept=True) - unit.forward for unit in keepers),
        ),
        cpu=updates + moved(on_ssd),
    )
    reads, writes, updates = update(in_backward)
    clearing = 0.5 * sizes.gradients / costs.copy
    backward = PhaseWork(
        ssd_read=read_weights * sizes.backward_weights + reads + on_ssd,
        ssd_write=writes + gradients_on_ssd * held,
        h2d=(Expression(sizes.copied_weights) + leaving) if separate_device else none,
        d2h=Expression(sizes.gradients) if separate_device else none,
        compute=Expression(
            micro_batches * sum(unit.backward for unit in seconds[shape.first_trained :])
            + sizes.gradients / costs.device_fill,  # zeros
            kept_activations=micro_batches * sum(unit.backward_if(kept=True) - unit.backward for unit in keepers),
        ),
        cpu=updates
        + gradients_in_host * (held / costs.copy)
        + Expression(clearing)  # the norm
        + moved(on_ssd),
    )
    reads, writes, updates = update(at_end)
    updated_units = sum(unit.weight_bytes for unit in shape.units if unit.chunks)
    end = PhaseWork(
        # a unit's weights come whole, whatever part of them is updated
        ssd_read=reads + read_weights * (updated_units if at_end else 0.0) + gradients_on_ssd * at_end,
        ssd_write=writes,
        h2d=none,
        d2h=none,
        compute=none,
        cpu=updates,
    )
    lost = costs.contention.transfer
    forward, backward = (
        replace(phase, compute=phase.compute + (phase.ssd_read + phase.ssd_write) * lost)
        for phase in (forward, backward)
    )
    return {"forward": forward, "backward": backward, "end": end}


class Rows:
    """Inequalities ``coefficients · x <= limit`` over all variables."""

    def __init__(self) -> None:
        self.matrix: list[np.ndarray] = []
        self.limits: list[float] = []

    def at_most(self, left: Expression, right: Expression) -> None:
        """``left <= right``, scaled so that its largest number is one."""
        row = np.zeros(len(_VARIABLES))
        for name, value in left.coefficients.items():
            row[_INDEX[name]] += value
        for name, value in right.coefficients.items():
            row[_INDEX[name]] -= value
        limit = right.constant - left.constant
        scale = max(np.abs(row).max(), abs(limit)) or 1.0
        self.matrix.append(row / scale)
        self.limits.append(limit / scale)


def solve(
    work: dict[str, PhaseWork], costs: StepCosts, space: list[tuple[Expression, float]], fixed: dict[str, float]
) -> Placement | None:
    """The shares that make the step shortest; None if nothing fits.

    Args:
        work: of each phase.
        costs: rates.
        space: bytes that must not exceed a limit.
        fixed: shares that are given, by name, and ``boundaries_ssd``.
    """
    rows = Rows()
    disk, cores = costs.disk, costs.contention
    for phase, of in work.items():
        part = lambda name, value=1.0, phase=phase: Expression(**{f"{phase}.{name}": value})  # noqa: E731
        length = part("length")
        rows.at_most(of.ssd_read, part("disk_read", disk.read) + part("disk_both", disk.mixed_read))
        rows.at_most(of.ssd_write, part("disk_write", disk.write) + part("disk_both", disk.mixed_write))
        rows.at_most(part("disk_read") + part("disk_write") + part("disk_both"), length)
        rows.at_most(of.compute, part("compute") + part("both", cores.compute))
        rows.at_most(of.cpu, part("cpu") + part("both", cores.cpu))
        rows.at_most(part("compute") + part("cpu") + part("both"), length)
        rows.at_most(of.h2d * (1 / costs.h2d), length)
        rows.at_most(of.d2h * (1 / costs.d2h), length)
    for used, limit in space:
        rows.at_most(used, Expression(limit))
    rows.at_most(Expression(boundaries_device=1.0, boundaries_host=1.0), Expression(1.0))
    objective = np.zeros(len(_VARIABLES))
    for phase in work:
        objective[_INDEX[f"{phase}.length"]] = 1.0
        for name in ("disk_read", "disk_write", "disk_both"):
            objective[_INDEX[f"{phase}.{name}"]] = _TIE_BREAK
    fixed = dict(fixed)
    if "boundaries_ssd" in fixed:  # what is on none of the other tiers
        elsewhere = Expression(boundaries_device=1.0, boundaries_host=1.0)
        rest = Expression(1.0 - fixed.pop("boundaries_ssd"))
        rows.at_most(rest, elsewhere)
        rows.at_most(elsewhere, rest)
    bounds: list[tuple[float, float | None]] = [(0.0, 1.0 if name in _SHARES else None) for name in _VARIABLES]
    for name, value in fixed.items():
        bounds[_INDEX[name]] = (value, value)
    found = linprog(objective, A_ub=np.array(rows.matrix), b_ub=np.array(rows.limits), bounds=bounds, method="highs")
    if found.status != 0:
        return None
    shares = {name: min(1.0, max(0.0, float(found.x[_INDEX[name]]))) for name in _SHARES}
    seconds = sum(float(found.x[_INDEX[f"{phase}.length"]]) for phase in work) + costs.step_overhead
    return Placement(**shares, seconds=seconds)


def space_rows(
    shape: StepShape,
    needs: Needs,
    limits: Limits,
    *,
    delayed_share: float,
    wait_for_norm: bool,
    separate_device: bool,
) -> list[tuple[Expression, float]]:
    """What memory and disk must hold, as expressions of the shares.

    Args:
        shape: sizes of the step.
        needs: of the same step with boundaries on SSD, nothing resident, and no gradients held.
        limits: of each tier.
        delayed_share, wait_for_norm, separate_device: of the plan.
    """
    sizes = step_totals(shape, updates_in_backward=True)
    held = sizes.gradients * (1.0 if wait_for_norm else delayed_share)
    host = Expression(
        needs.total(Tier.HOST),
        resident_weights=sizes.all_weights,
        resident_state=sizes.state,
        gradients_host=held,
        boundaries_host=sizes.boundaries,
        **({} if separate_device else {"kept_activations": sizes.kept}),
    )
    disk = Expression(
        needs.total(Tier.SSD) + held,
        gradients_host=-held,
        boundaries_host=-sizes.boundaries,
        boundaries_device=-sizes.boundaries,
    )
    rows = [(host, float(limits.host)), (disk, float(limits.disk))]
    if separate_device and limits.device is not None:
        device = Expression(needs.total(Tier.DEVICE), boundaries_device=sizes.boundaries, kept_activations=sizes.kept)
        rows.append((device, float(limits.device)))
    return rows
