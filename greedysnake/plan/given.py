"""A step with everything given by hand, in this system's orders or another's: nothing is searched for."""

from dataclasses import dataclass
from typing import Any

from greedysnake.errors import ConfigError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.baselines import build_baseline, untied
from greedysnake.plan.memory import Needs
from greedysnake.plan.query import Case, PlanQuery, over, simulate_case
from greedysnake.plan.simulate import Simulation, simulate
from greedysnake.plan.slots import SLOTS, with_slots
from greedysnake.plan.step_costs import least_seconds, step_costs
from greedysnake.report.wording import moved, percent, seconds, tokens
from greedysnake.schedule import BUILDERS, Choices, Resource, Tier
from greedysnake.units import format_bytes

BASELINES = ("zero-infinity", "zero-offload")
ORDERS = (*sorted(BUILDERS), *BASELINES)
_NOT_ITS_OWN = {
    "horizontal": ("group_size",),
    "zero-infinity": ("group_size", "delayed_share", "resident_state"),
    "zero-offload": ("group_size", "delayed_share", "resident_state", "resident_weights"),
}
"""What an order leaves no choice of."""


@dataclass(frozen=True, kw_only=True)
class GivenStep:
    """A simulated step.

    Attributes:
        query: what was asked.
        batch: sizes of the step.
        step: the simulation.
        least_seconds: the roofline of its operations.
        over: bytes by which it exceeds the machine's memory and disk, for each tier in which it does.
    """

    query: PlanQuery
    batch: BatchShape
    step: Simulation
    least_seconds: float
    over: dict[Tier, int]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step by its seconds."""
        return self.batch.micro_batches * self.batch.rows * self.batch.tokens / self.step.seconds

    def as_json(self) -> dict[str, Any]:
        """The step as plain data."""
        step = self.step
        return {
            "predicted": True,
            "model": self.query.workload.name,
            "machine": self.query.hardware.name,
            "schedule": step.schedule.name,
            "batch": {name: getattr(self.batch, name) for name in ("micro_batches", "rows", "tokens")},
            "step_seconds": step.seconds,
            "least_seconds": self.least_seconds,
            "tokens_per_second": self.tokens_per_second,
            "busy": {**{str(k): v for k, v in step.busy_shares.items()}, "disk": step.disk_busy / step.seconds},
            "ssd_read_bytes": step.ssd_read_bytes,
            "ssd_written_bytes": step.ssd_written_bytes,
            "peak_bytes": {str(tier): size for tier, size in step.peak_bytes.items()},
            "over_host_bytes": self.over.get(Tier.HOST, 0),
            "over_device_bytes": self.over.get(Tier.DEVICE, 0),
            "over_disk_bytes": self.over.get(Tier.SSD, 0),
        }

    def in_words(self) -> str:
        """The step for a person."""
        step, parameters = self.step, self.query.workload.parameters
        shares = step.busy_shares
        lines = [
            f"{self.query.workload.name} on {self.query.hardware.name}, {step.schedule.name}, "
            f"{self.batch.micro_batches} micro-batches of {self.batch.rows} x {self.batch.tokens}: simulated",
            f"{tokens(self.tokens_per_second)} tokens/s, {seconds(step.seconds)} a step; no order of this work "
            f"could take less than {seconds(self.least_seconds)}",
            f"busy: computation {percent(shares[Resource.COMPUTE])}, disks {percent(step.disk_busy / step.seconds)}, "
            f"host {percent(shares[Resource.CPU])}, copies {percent(shares[Resource.H2D])} and "
            f"{percent(shares[Resource.D2H])}",
            f"SSD: {moved(step.ssd_read_bytes)} read and {moved(step.ssd_written_bytes)} written, "
            f"{step.ssd_read_bytes / parameters:.3g} and {step.ssd_written_bytes / parameters:.3g} B a parameter",
            f"live at most: {format_bytes(step.peak_bytes[Tier.DEVICE])} on the device, "
            f"{format_bytes(step.peak_bytes[Tier.HOST])} in host memory, besides what computation takes",
        ]
        names = {Tier.HOST: "host memory", Tier.DEVICE: "device memory", Tier.SSD: "disk"}
        for tier, missing in self.over.items():
            lines.append(f"It does not fit: {format_bytes(missing)} of {names[tier]} too much")
        return "\n".join(lines)


def refuse_options(order: str | None, given: dict[str, Any]) -> None:
    """Refuse what was asked of another system's order that it has no choice of.

    Args:
        order: as the command line has it; None: as the settings say.
        given: fields of the query by name, as the command line has them; None and 0 ask for nothing.

    Raises:
        ConfigError: something was asked; with all that was.
    """
    names = [name for name in _NOT_ITS_OWN.get(order or "", ()) if given.get(name)]
    if names:
        options = ", ".join(f"--{name.replace('_', '-')} {given[name]:g}" for name in names)
        raise ConfigError(f"{options}: found with --schedule {order}, which has no such choice; leave it out")


def simulate_given(query: PlanQuery) -> GivenStep:
    """Simulate a step with the query's choices, and plain ones for what it leaves open.

    Raises:
        ConfigError: the order is unknown.
    """
    if query.schedule not in ORDERS:
        raise ConfigError(f"schedule: found {query.schedule!r}; needs one of {', '.join(ORDERS)}")
    rows = query.rows or 1
    micro_batches = query.micro_batches or max(1, (query.sequences or 4 * rows) // rows)
    batch = BatchShape(micro_batches=micro_batches, rows=rows, tokens=query.tokens)
    if query.schedule in BASELINES:
        return _baseline(query, batch)
    alpha = query.delayed_share if query.delayed_share is not None else float(query.clipping)
    choices = Choices(
        delayed_share=alpha,
        wait_for_norm=query.waits_for_norm(alpha),
        separate_device=query.hardware.separate_device,
        group_size=query.group_size,
        boundaries_on_device=query.boundaries_on_device or 0.0,
        boundaries_on_ssd=query.boundaries_on_ssd or 0.0,
        kept_activations=query.kept_activations or 0.0,
        gradients=query.gradients or Tier.HOST,
        resident_weights=query.resident_weights or 0.0,
        resident_state=query.resident_state or 0.0,
    )
    layers = query.layers_per_unit or 1
    cases = [Case(batch=batch, layers_per_unit=layers, choices=with_slots(choices, slots)) for slots in SLOTS]
    short = {case: over(case.needs(query), query.limits) for case in cases}
    case = min(cases, key=lambda one: sum(short[one].values()))  # of those that fit, the one with the most buffers
    found = simulate_case(case, query)
    return GivenStep(
        query=query,
        batch=batch,
        step=found.step,
        least_seconds=found.least_seconds,
        over=short[case],
    )


def _baseline(query: PlanQuery, batch: BatchShape) -> GivenStep:
    shape = untied(
        query.workload.step_shape(
            batch, chunks_per_unit=16, split_master=False, eight_bit_moments=query.eight_bit_moments
        )
    )
    on_ssd = query.schedule == "zero-infinity"
    schedule = build_baseline(shape, resident_weights=query.resident_weights or 0.0, on_ssd=on_ssd)
    costs = step_costs(query.hardware, query.workload, batch)
    step = simulate(schedule, shape, costs)
    computing = query.workload.computing_bytes(batch, separate_device=True)
    resident = round((query.resident_weights or 0.0) * sum(unit.weight_bytes for unit in shape.units)) if on_ssd else 0
    needs = Needs(
        host={"live": step.peak_bytes[Tier.HOST], "resident weights": resident},
        device={"live": step.peak_bytes[Tier.DEVICE], "computation": computing},
        disk={"weights, state and gradients": schedule.reserved_bytes(Tier.SSD)},
    )
    return GivenStep(
        query=query,
        batch=batch,
        step=step,
        least_seconds=least_seconds(schedule, shape, costs),
        over=over(needs, query.limits),
    )
