"""What goes where, as a linear program: for a fixed batch, α and unit size, the shares that make a step shortest.

Each phase of a step (:mod:`greedysnake.plan.phases`) is at least as long as the work of each resource in it; reads and
writes share the disks, computation and optimizer the cores, each as a mixture of times in which one or both are busy.
Filling and draining of the pipeline are left out: the simulator knows them, and decides between plans.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from greedysnake.plan.costs import StepCosts
from greedysnake.plan.memory import Needs
from greedysnake.plan.phases import PHASES, Expression, PhaseWork, step_totals
from greedysnake.schedule import StepShape, Tier

_SHARES = (
    "resident_weights",
    "resident_state",
    "boundaries_device",
    "boundaries_host",
    "gradients_host",
    "kept_activations",
)
_SLICES = ("disk_read", "disk_write", "disk_both", "compute", "cpu", "both", "length")
_VARIABLES = (*_SHARES, *(f"{phase}.{part}" for phase in PHASES for part in _SLICES))
_INDEX = {name: number for number, name in enumerate(_VARIABLES)}
_TIE_BREAK = 1e-4
"""Weight of disk time in the objective: among plans of one length, the one that moves the fewest bytes."""


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
    groups: int = 1,
    together: float = 1.0,
) -> list[tuple[Expression, float]]:
    """What memory and disk must hold, as expressions of the shares.

    Args:
        shape: sizes of the step.
        needs: of the same step with boundaries on SSD, nothing resident, and no gradients held.
        limits: of each tier.
        delayed_share, wait_for_norm, separate_device: of the plan.
        groups: of micro-batches, of which one's boundaries and activations exist at a time.
        together: the largest group's share of all micro-batches.
    """
    sizes = step_totals(shape, updates_in_backward=True)
    held = sizes.gradients * (1.0 if wait_for_norm or groups > 1 else delayed_share)
    boundaries, kept = together * sizes.boundaries, together * sizes.kept
    host = Expression(
        needs.total(Tier.HOST),
        resident_weights=sizes.all_weights,
        resident_state=sizes.state,
        gradients_host=held,
        boundaries_host=boundaries,
        **({} if separate_device else {"kept_activations": kept}),
    )
    disk = Expression(
        needs.total(Tier.SSD) - needs.disk.get("held", 0) + held,
        gradients_host=-held,
        boundaries_host=-boundaries,
        boundaries_device=-boundaries,
    )
    rows = [(host, float(limits.host)), (disk, float(limits.disk))]
    if separate_device and limits.device is not None:
        device = Expression(needs.total(Tier.DEVICE), boundaries_device=boundaries, kept_activations=kept)
        rows.append((device, float(limits.device)))
    return rows
