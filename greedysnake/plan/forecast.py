"""What will happen: a plan with its simulated step, and what would help."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from greedysnake.plan.collecting import without_collecting
from greedysnake.plan.hardware import ComputeRates, Disk, Hardware
from greedysnake.plan.memory import Needs
from greedysnake.plan.placer import Placer
from greedysnake.plan.query import Build, Candidate, Case, PlanQuery, builder, simulate_plain, with_snapshots
from greedysnake.plan.roofline import RooflinePoint
from greedysnake.plan.search import compute_roof, search
from greedysnake.plan.step_costs import measured_times
from greedysnake.schedule import Tier

DAY_SECONDS = 86_400
CHINCHILLA_TOKENS = 20
"""Tokens a parameter that make the best of a budget of computation, roughly (arXiv 2203.15556)."""

_WORTH_TELLING = 1.01
"""Of what makes a plan no faster than this many times, nothing is said."""
_NO_ROOM = 1.02
"""A plan within this factor of the program's shortest step gains little from another placement."""


@dataclass(frozen=True, kw_only=True)
class Help:
    """What one change of the machine would do, or of the batch.

    Attributes:
        change: in words.
        speedup: tokens per second with it, over those without.
    """

    change: str
    speedup: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a number of tokens takes.

    Attributes:
        tokens, steps: of the whole run.
        tokens_per_parameter: of the model.
        best_tokens: that make the best of a budget of computation, CHINCHILLA_TOKENS a parameter; None for a model that
            is trained in part, of which that rule (arXiv 2203.15556) says nothing.
        days: of training.
        kilowatt_hours: of energy; None where the profile has no watts.
        written_bytes: to the disks, snapshots included.
        endurance_share: of what the disks may be written in their lives; None where the profile does not say.
    """

    tokens: float
    steps: float
    tokens_per_parameter: float
    best_tokens: float | None
    days: float
    kilowatt_hours: float | None
    written_bytes: float
    endurance_share: float | None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What will happen with a model on a machine. Everything is predicted; nothing has run.

    Attributes:
        query: what was asked.
        candidate: the plan and its simulated step.
        needs: memory and disk by purpose.
        measured: whether computation's times were measured with this model's own units.
        compute_roof: tokens per second if a step were computation and nothing else.
        helps: what would make it faster (:func:`what_would_help`).
        points: of the roofline, if they were asked for.
    """

    query: PlanQuery
    candidate: Candidate
    needs: Needs
    measured: bool
    compute_roof: float
    helps: tuple[Help, ...] = ()
    points: tuple[RooflinePoint, ...] = ()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        batch = self.candidate.case.batch
        return batch.micro_batches * batch.rows * batch.tokens

    @property
    def busy(self) -> dict[str, float]:
        """Share of the step in which each resource works; both directions of the disks are one more."""
        step = self.candidate.step
        shares = {str(resource): share for resource, share in step.busy_shares.items()}
        return {**shares, "disk": step.disk_busy / step.seconds}

    @property
    def bottleneck(self) -> str:
        """The resource that is busy for longest."""
        whole = ("compute", "disk", "h2d", "d2h", "cpu")
        return max(whole, key=lambda name: self.busy[name])

    @property
    def best_tokens(self) -> float | None:
        """Tokens that make the best of a budget of computation with a model of this size (arXiv 2203.15556).

        None for one that is trained in part: the rule is of models that are trained whole.
        """
        workload = self.query.workload
        if any(part.frozen_bytes for part in workload.parts):
            return None
        return CHINCHILLA_TOKENS * workload.parameters

    def budget(self, tokens: float) -> Budget:
        """What training on ``tokens`` takes."""
        machine = self.query.hardware
        steps = tokens / self.tokens_per_step
        seconds = steps * self.candidate.mean_seconds
        endurance = [disk.endurance for disk in machine.disks]
        written = steps * self.candidate.mean_written_bytes
        known = None not in endurance
        return Budget(
            tokens=tokens,
            steps=steps,
            tokens_per_parameter=tokens / self.query.workload.parameters,
            best_tokens=self.best_tokens,
            days=seconds / DAY_SECONDS,
            kilowatt_hours=None if machine.watts is None else machine.watts * seconds / 3.6e6,
            written_bytes=written,
            endurance_share=written / sum(one for one in endurance if one is not None) if known else None,
        )

    def as_json(self, tokens: float | None = None) -> dict[str, Any]:
        """The forecast as plain data; rates in bytes or tokens per second.

        Args:
            tokens: to train on; None: the best for the model's size, if it is trained whole.
        """
        case, step, limits = self.candidate.case, self.candidate.step, self.query.limits
        found: dict[str, Any] = {
            "predicted": True,
            "model": self.query.workload.name,
            "parameters": self.query.workload.parameters,
            "dtype": self.query.workload.dtype,
            "machine": self.query.hardware.name,
            "schedule": self.query.schedule,
            "computation_measured": self.measured,
            "batch": {
                "micro_batches": case.batch.micro_batches,
                "rows": case.batch.rows,
                "tokens": case.batch.tokens,
                "sequences": case.batch.micro_batches * case.batch.rows,
                "tokens_per_step": self.tokens_per_step,
            },
            "layers_per_unit": case.layers_per_unit,
            "choices": asdict(case.choices),
            "step_seconds": step.seconds,
            "snapshot_seconds": self.candidate.snapshot_seconds,
            "tokens_per_second": self.candidate.tokens_per_second,
            "model_flops_per_second": self.query.workload.model_flops_per_token(self.query.tokens)
            * self.candidate.tokens_per_second,
            "roofline": {
                "step_seconds": self.candidate.least_seconds,
                "compute_tokens_per_second": self.compute_roof,
            },
            "bottleneck": self.bottleneck,
            "busy": self.busy,
            "ssd_read_bytes": step.ssd_read_bytes,
            "ssd_written_bytes": step.ssd_written_bytes,
            "snapshot_written_bytes": self.candidate.snapshot_bytes,
            "host_memory": _tier(self.needs.host, limits.host),
            "device_memory": _tier(self.needs.device, limits.device),
            "disk": _tier(self.needs.disk, limits.disk),
            "would_help": [asdict(help_) for help_ in self.helps],
        }
        if self.points:
            found["roofline_points"] = [asdict(point) for point in self.points]
        wanted = tokens or self.best_tokens
        if wanted is not None:
            found["budget"] = asdict(self.budget(wanted))
        return found


def _tier(purposes: dict[str, int], limit: int | None) -> dict[str, Any]:
    return {"needed_bytes": sum(purposes.values()), "limit_bytes": limit, "by_purpose": purposes}


def forecast(query: PlanQuery, *, helps: bool = True) -> Forecast:
    """Find a plan and say what it will do.

    Args:
        query: what is asked.
        helps: whether to find out what would make it faster.

    Raises:
        MemoryBudgetError, StorageError: nothing fits.
    """
    return describe(query, search(query), helps=helps)


def describe(query: PlanQuery, candidate: Candidate, *, helps: bool = False) -> Forecast:
    """What a plan that was already found will do."""
    case = candidate.case
    return Forecast(
        query=query,
        candidate=candidate,
        needs=case.needs(query),
        measured=measured_times(query.hardware, query.workload, case.batch) is not None,
        compute_roof=compute_roof(query, case.batch),
        helps=tuple(what_would_help(query, candidate)) if helps else (),
    )


def what_would_help(query: PlanQuery, candidate: Candidate) -> list[Help]:
    """What each resource, doubled, would do to the same batch, the most first; what does nothing is left out.

    Last, where the batch was given, what twice its micro-batches would do.
    """
    changes: list[tuple[str, Callable[[Hardware], Hardware]]] = [
        ("disks twice as fast", _faster_disks),
        ("computation twice as fast", _faster_compute),
        ("an optimizer twice as fast", lambda machine: machine.model_copy(update={"optimizer": 2 * machine.optimizer})),
        ("twice the host memory", lambda machine: machine.model_copy(update={"host_memory": 2 * machine.host_memory})),
    ]
    if query.hardware.separate_device:
        changes.append(("copies to and from the device twice as fast", _faster_copies))
        changes.append(("twice the device memory", _more_device_memory))
    build = builder(query, known=candidate)
    worth_telling = _WORTH_TELLING * candidate.tokens_per_second
    found: list[Help] = []
    with without_collecting():
        for change, make in changes:
            other = replace(query, hardware=make(query.hardware))
            cases = dict.fromkeys([candidate.case, *_replaced(other, candidate)])
            found += _help(change, _fastest(cases, other, build, worth_telling), candidate)
        found.sort(key=lambda help_: help_.speedup, reverse=True)
        if query.sequences is not None or query.micro_batches is not None:
            change = "twice the micro-batches (another batch size for training)"
            found += _help(change, _fastest(_larger_batch(query, candidate), query, build, worth_telling), candidate)
    return found


def _help(change: str, tokens_per_second: float, candidate: Candidate) -> list[Help]:
    """One line, if it is worth telling."""
    if tokens_per_second <= _WORTH_TELLING * candidate.tokens_per_second:
        return []
    return [Help(change=change, speedup=tokens_per_second / candidate.tokens_per_second)]


def _larger_batch(query: PlanQuery, candidate: Candidate) -> list[Case]:
    """The same choices for twice the micro-batches, as far as they fit, and the program's.

    None where the program shows that twice the micro-batches take about twice the time.
    """
    case, placer = candidate.case, Placer(query)
    batch = replace(case.batch, micro_batches=2 * case.batch.micro_batches)
    alpha, unit_size, group_size = case.choices.delayed_share, case.layers_per_unit, case.choices.group_size
    shortest = placer.place(batch, alpha, unit_size, placer.fixed_shares(), group_size)
    if shortest is not None and 2 * candidate.mean_seconds <= _NO_ROOM * shortest.seconds:
        return []
    same = placer.fit_shares(replace(case, batch=batch))
    cases = [*([] if same is None else [same]), *placer.cases(batch, alpha, unit_size, group_size)[:1]]
    return list(dict.fromkeys(cases))


def _fastest(cases: Iterable[Case], query: PlanQuery, build: Build, least: float) -> float:
    """Most tokens per second of any case, or ``least`` if none has more.

    With snapshots no case is faster than without, so they are simulated only where it may be the fastest.
    """
    plain = sorted((simulate_plain(case, query, build) for case in cases), key=_speed, reverse=True)
    fastest = least
    for one in plain:
        if one.tokens_per_second > fastest:
            fastest = max(fastest, with_snapshots(one, query, build).tokens_per_second)
    return fastest


def _speed(candidate: Candidate) -> float:
    return candidate.tokens_per_second


def _replaced(query: PlanQuery, candidate: Candidate) -> list[Case]:
    """The best placement of the same batch, α and unit size on another machine.

    None where the program shows that no placement could be much faster than the present one is already.
    """
    case, placer = candidate.case, Placer(query)
    batch, alpha, unit_size = case.batch, case.choices.delayed_share, case.layers_per_unit
    group_size = case.choices.group_size
    shortest = placer.place(batch, alpha, unit_size, placer.fixed_shares(), group_size)
    if shortest is None or candidate.mean_seconds <= _NO_ROOM * shortest.seconds:
        return []
    same_tier = Placer(replace(query, gradients=case.choices.gradients))
    return same_tier.cases(batch, alpha, unit_size, group_size)[:1]


def _faster_disks(machine: Hardware) -> Hardware:
    def twice(disk: Disk) -> Disk:
        rates = ("read", "write", "mixed_read", "mixed_write")
        return disk.model_copy(update={name: 2 * getattr(disk, name) for name in rates})

    together = None if machine.together is None else twice(machine.together)
    return machine.model_copy(update={"disks": tuple(map(twice, machine.disks)), "together": together})


def _faster_compute(machine: Hardware) -> Hardware:
    def twice(rates: ComputeRates) -> ComputeRates:
        return rates.model_copy(update={"matrix": 2 * rates.matrix})

    times = tuple(times.divided(2) for times in machine.layer_times)
    rates = {dtype: twice(one) for dtype, one in machine.compute.items()}
    return machine.model_copy(
        update={"compute": rates, "layer_times": times, "compute_memory": 2 * machine.compute_memory}
    )


def _faster_copies(machine: Hardware) -> Hardware:
    return machine.model_copy(update={name: 2 * (getattr(machine, name) or 1.0) for name in ("h2d", "d2h")})


def _more_device_memory(machine: Hardware) -> Hardware:
    return machine.model_copy(update={"device_memory": 2 * (machine.device_memory or 0)})


SHOWN_RESOURCES = {
    "compute": "computation",
    "disk": "the disks",
    "h2d": "copies to the device",
    "d2h": "copies from the device",
    "cpu": "the optimizer and copies on the host",
}
"""How a person reads a bottleneck."""
_TIERS = {Tier.DEVICE: "device memory", Tier.HOST: "host memory", Tier.SSD: "SSD"}


def where(tier: Tier) -> str:
    """What a person calls a tier."""
    return _TIERS[tier]
