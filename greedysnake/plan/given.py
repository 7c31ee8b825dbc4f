"""A step with everything given by hand, in this system's orders or another's: nothing is searched for."""

from dataclasses import dataclass
from typing import Any

from greedysnake.errors import ConfigError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.baselines import build_baseline, untied
from greedysnake.plan.query import Case, PlanQuery, simulate_case
from greedysnake.plan.simulate import Simulation, simulate
from greedysnake.plan.slots import SLOTS, with_slots
from greedysnake.plan.step_costs import least_seconds, step_costs
from greedysnake.report.wording import moved, percent, seconds
from greedysnake.schedule import BUILDERS, Choices, Resource, Tier
from greedysnake.units import format_bytes

BASELINES = ("zero-infinity", "zero-offload")
ORDERS = (*sorted(BUILDERS), *BASELINES)


@dataclass(frozen=True, kw_only=True)
class GivenStep:
    """A simulated step.

    Attributes:
        query: what was asked.
        batch: sizes of the step.
        step: the simulation.
        least_seconds: the roofline of its operations.
        over_host, over_device: bytes by which it exceeds the machine's memory, 0 if it does not.
    """

    query: PlanQuery
    batch: BatchShape
    step: Simulation
    least_seconds: float
    over_host: int
    over_device: int

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
            "over_host_bytes": self.over_host,
            "over_device_bytes": self.over_device,
        }

    def in_words(self) -> str:
        """The step for a person."""
        step, parameters = self.step, self.query.workload.parameters
        shares = step.busy_shares
        lines = [
            f"{self.query.workload.name} on {self.query.hardware.name}, {step.schedule.name}, "
            f"{self.batch.micro_batches} micro-batches of {self.batch.rows} x {self.batch.tokens}: simulated",
            f"{self.tokens_per_second:,.3g} tokens/s, {seconds(step.seconds)} a step; no order of this work could take "
            f"less than {seconds(self.least_seconds)}",
            f"busy: computation {percent(shares[Resource.COMPUTE])}, disks {percent(step.disk_busy / step.seconds)}, "
            f"host {percent(shares[Resource.CPU])}, copies {percent(shares[Resource.H2D])} and "
            f"{percent(shares[Resource.D2H])}",
            f"SSD: {moved(step.ssd_read_bytes)} read and {moved(step.ssd_written_bytes)} written, "
            f"{step.ssd_read_bytes / parameters:.3g} and {step.ssd_written_bytes / parameters:.3g} B a parameter",
            f"live at most: {format_bytes(step.peak_bytes[Tier.DEVICE])} on the device, "
            f"{format_bytes(step.peak_bytes[Tier.HOST])} in host memory, besides what computation takes",
        ]
        for name, missing in (("host", self.over_host), ("device", self.over_device)):
            if missing:
                lines.append(f"It does not fit: {format_bytes(missing)} of {name} memory too much")
        return "\n".join(lines)


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
        boundaries_on_device=query.boundaries_on_device or 0.0,
        boundaries_on_ssd=query.boundaries_on_ssd or 0.0,
        kept_activations=query.kept_activations or 0.0,
        gradients=query.gradients or Tier.HOST,
        resident_weights=query.resident_weights or 0.0,
        resident_state=query.resident_state or 0.0,
    )
    layers = query.layers_per_unit or 1
    cases = [Case(batch=batch, layers_per_unit=layers, choices=with_slots(choices, slots)) for slots in SLOTS]
    case = min(cases, key=lambda one: sum(_over(query, one)))  # of those that fit, the one with the most buffers
    found = simulate_case(case, query)
    over_host, over_device = _over(query, case)
    return GivenStep(
        query=query,
        batch=batch,
        step=found.step,
        least_seconds=found.least_seconds,
        over_host=over_host,
        over_device=over_device,
    )


def _over(query: PlanQuery, case: Case) -> tuple[int, int]:
    """Bytes of host and device memory that a case takes too much."""
    needs, limits = case.needs(query), query.limits
    device = 0 if limits.device is None else max(0, needs.total(Tier.DEVICE) - limits.device)
    return max(0, needs.total(Tier.HOST) - limits.host), device


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
    device = step.peak_bytes[Tier.DEVICE] + computing
    resident = round((query.resident_weights or 0.0) * sum(unit.weight_bytes for unit in shape.units)) if on_ssd else 0
    return GivenStep(
        query=query,
        batch=batch,
        step=step,
        least_seconds=least_seconds(schedule, shape, costs),
        over_host=max(0, step.peak_bytes[Tier.HOST] + resident - query.limits.host),
        over_device=max(0, device - query.limits.device) if query.limits.device is not None else 0,
    )
