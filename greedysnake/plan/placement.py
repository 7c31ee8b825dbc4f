"""Where everything of a step goes, decided before it runs, with the reason for each choice.

Only what moves the fewest bytes is preferred here: gradients that wait for their update and boundaries
stay in host memory if they fit, and go to SSD if they do not.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from greedysnake.errors import MemoryBudgetError
from greedysnake.models.skeleton import Skeleton
from greedysnake.plan.activations import (
    BatchShape,
    boundary_bytes,
    head_activation_bytes,
    paused_bytes,
    unit_activation_bytes,
)
from greedysnake.plan.host import process_bytes, usable_bytes
from greedysnake.schedule import BUILDERS, Choices, Schedule, StepShape, Tier
from greedysnake.units import format_bytes

_SLOTS = (
    # one unit in use, one arriving, one leaving; a gradient in use and one that is being applied
    {"weight_slots": 3, "gradient_slots": 2, "state_slots": 4},
    # the least: little overlaps, but it runs
    {"weight_slots": 2, "gradient_slots": 1, "state_slots": 2},
)

_START_BYTES = 32 * 2**20  # what a process gains with its first step: code paths, thread stacks
_RESIDENT_STEPS = 20  # shares are multiples of a twentieth


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user fixed; None leaves it to the plan.

    Attributes:
        schedule: ``"vertical"`` or ``"horizontal"``.
        delayed_share: α.
        snake: whether every other unit takes the micro-batches in reverse.
        boundaries, gradients: tiers.
        host_memory: bytes that the process may use.
        separate_device: whether computation has memory of its own.
        device_memory: bytes of it that may be used, None for no limit.
        clipping: whether the gradient's norm is limited.
        commits_every_step: whether what a step wrote can be taken back until the next one.
        resident_weights, resident_state: shares that stay in host memory; None: as much as fits.
    """

    schedule: str = "vertical"
    delayed_share: float | None = None
    snake: bool = True
    boundaries: Tier | None = None
    gradients: Tier | None = None
    host_memory: int | None = None
    separate_device: bool = False
    device_memory: int | None = None
    clipping: bool = False
    commits_every_step: bool = True
    resident_weights: float | None = 0.0
    resident_state: float | None = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will happen in a step, where, and why.

    Attributes:
        batch: sizes of the step's batch.
        schedule: name of the schedule.
        shape, choices: what the schedule is built from.
        host_bytes, device_bytes: expected use of memory, by purpose.
        host_budget, device_budget: bytes that may be used; None for no limit.
        reasons: why each choice was made.
    """

    batch: BatchShape
    schedule: str
    shape: StepShape
    choices: Choices
    host_bytes: dict[str, int]
    host_budget: int
    device_bytes: dict[str, int]
    device_budget: int | None
    reasons: tuple[str, ...]

    def fits_host(self) -> bool:
        """Whether host memory suffices."""
        return sum(self.host_bytes.values()) <= self.host_budget

    def fits_device(self) -> bool:
        """Whether device memory suffices."""
        return self.device_budget is None or sum(self.device_bytes.values()) <= self.device_budget

    def build(self, *, pending: bool) -> Schedule:
        """The schedule of a step; ``pending`` as the builders have it."""
        return BUILDERS[self.schedule](self.shape, self.choices, pending=pending)

    def as_json(self) -> dict[str, Any]:
        """The plan for ``plan.json``."""
        schedule = self.build(pending=True)
        moved = dict.fromkeys(("ssd_read", "ssd_write"), 0)
        for operation in schedule.operations:
            if operation.resource in moved:
                moved[operation.resource] += operation.bytes
        return {
            "schedule": self.schedule,
            "batch": asdict(self.batch),
            "choices": asdict(self.choices),
            "delayed_parameters_share": self._delayed_parameters_share(),
            "units": len(self.shape.units),
            "host_memory": {
                "budget_bytes": self.host_budget,
                "expected_bytes": sum(self.host_bytes.values()),
                "by_purpose": self.host_bytes,
            },
            "device_memory": {
                "budget_bytes": self.device_budget,
                "expected_bytes": sum(self.device_bytes.values()),
                "by_purpose": self.device_bytes,
            },
            "ssd": {
                "weights_and_state_bytes": schedule.pools["ssd_weights"].bytes + schedule.pools["ssd_state"].bytes,
                "boundary_bytes": schedule.pools["ssd_boundary"].bytes,
                "gradient_bytes": schedule.pools["held"].bytes if self.choices.gradients == Tier.SSD else 0,
                "read_bytes_per_step": moved["ssd_read"],
                "write_bytes_per_step": moved["ssd_write"],
            },
            "reasons": list(self.reasons),
        }

    def _delayed_parameters_share(self) -> float:
        """The part of all parameters that is delayed, once α has been rounded to whole chunks of each unit."""
        units = self.shape.units
        delayed = sum(unit.chunks[c].gradient_bytes for unit in units for c in self.choices.delayed_chunks(unit))
        return delayed / sum(unit.gradient_bytes for unit in units)


def make_plan(skeleton: Skeleton, batch: BatchShape, request: PlanRequest) -> Plan:
    """Place a step.

    Raises:
        MemoryBudgetError: it does not fit, with what is needed, found, and could be changed.
    """
    budget = usable_bytes() if request.host_memory is None else request.host_memory
    reasons = [
        f"host memory: {format_bytes(budget)}, "
        + ("what is free less a tenth" if request.host_memory is None else "as configured")
    ]
    share = request.delayed_share
    if share is None:
        share = 1.0 if request.clipping else 0.0
        reasons.append(
            "delayed share 1: clipping needs the norm of the whole gradient, so updates wait for the next forward"
            if request.clipping
            else "delayed share 0: without clipping each unit is updated as soon as its gradient is complete"
        )
    boundaries: Sequence[Tier] = [Tier.HOST, Tier.SSD]
    if request.boundaries:
        boundaries = [request.boundaries]
    elif request.separate_device:
        boundaries = [Tier.DEVICE, Tier.HOST, Tier.SSD]
    gradients: Sequence[Tier] = [request.gradients] if request.gradients else [Tier.HOST, Tier.SSD]
    shape = step_shape(skeleton, batch)
    plans = []
    for slots, gradient_tier, boundary_tier in product(_SLOTS, gradients, boundaries):
        choices = Choices(
            delayed_share=share,
            wait_for_norm=share < 1 and (request.clipping or not request.commits_every_step),
            separate_device=request.separate_device,
            boundaries=boundary_tier,
            gradients=gradient_tier,
            snake=request.snake,
            resident_weights=request.resident_weights or 0.0,
            resident_state=request.resident_state or 0.0,
            **slots,
        )
        host, device = _needs(skeleton, batch, request.schedule, shape, choices)
        plans.append(
            Plan(
                batch=batch,
                schedule=request.schedule,
                shape=shape,
                choices=choices,
                host_bytes=host,
                host_budget=budget,
                device_bytes=device,
                device_budget=request.device_memory,
                reasons=(*reasons, *_placement_reasons(choices, request)),
            )
        )
    on_device = [plan for plan in plans if plan.fits_device()]
    if not on_device:
        raise _too_small(min(plans, key=lambda plan: sum(plan.device_bytes.values())), "device")
    fitting = [plan for plan in on_device if plan.fits_host()]
    if not fitting:
        raise _too_small(min(on_device, key=lambda plan: sum(plan.host_bytes.values())), "host")
    return _with_residents(fitting[0], skeleton, request)


def _with_residents(plan: Plan, skeleton: Skeleton, request: PlanRequest) -> Plan:
    """Fill what is left of host memory: with weights, which save three bytes of traffic a byte, then with state."""
    for name in ("resident_weights", "resident_state"):
        if getattr(request, name) is not None:
            continue
        fewest, most = 0, _RESIDENT_STEPS
        while fewest < most:  # the largest share that fits
            middle = (fewest + most + 1) // 2
            if _with_share(plan, skeleton, name, middle / _RESIDENT_STEPS).fits_host():
                fewest = middle
            else:
                most = middle - 1
        plan = _with_share(plan, skeleton, name, fewest / _RESIDENT_STEPS)
        what = name.removeprefix("resident_")
        reason = f"{fewest / _RESIDENT_STEPS:.0%} of {what} stays in host memory: as much as fits"
        plan = replace(plan, reasons=(*plan.reasons, reason))
    return plan


def _with_share(plan: Plan, skeleton: Skeleton, name: str, share: float) -> Plan:
    if name == "resident_weights":
        choices = replace(plan.choices, resident_weights=share)
    else:
        choices = replace(plan.choices, resident_state=share)
    host, device = _needs(skeleton, plan.batch, plan.schedule, plan.shape, choices)
    return replace(plan, choices=choices, host_bytes=host, device_bytes=device)


def step_shape(skeleton: Skeleton, batch: BatchShape) -> StepShape:
    """The sizes that schedules for this model and batch are built from."""
    structure = skeleton.structure
    return StepShape(
        units=tuple(
            layout.shape(backward_needs_weights=unit > 0 or structure.embedding_backward_needs_weights)
            for unit, layout in enumerate(skeleton.layouts)
        ),
        micro_batches=batch.micro_batches,
        boundary_bytes=boundary_bytes(skeleton, batch),
        tied=structure.tied,
    )


def _needs(
    skeleton: Skeleton, batch: BatchShape, name: str, shape: StepShape, choices: Choices
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of host and of device memory by purpose."""
    pools = BUILDERS[name](shape, choices, pending=True).pools
    largest_chunk = max(chunk.elements for layout in skeleton.layouts for chunk in layout.chunks)
    host = {"process": process_bytes() + _START_BYTES, "master_weights": 4 * largest_chunk}
    device: dict[str, int] = {}
    computing = max(unit_activation_bytes(skeleton, batch), head_activation_bytes(skeleton, batch))
    computing += paused_bytes(skeleton, batch)
    (device if choices.separate_device else host)["computation"] = computing
    for pool_name, pool in pools.items():
        if pool.tier != Tier.SSD and pool.bytes:
            (host if pool.tier == Tier.HOST else device)[pool_name] = pool.bytes
    return host, device


def _placement_reasons(choices: Choices, request: PlanRequest) -> list[str]:
    wide = choices.weight_slots == _SLOTS[0]["weight_slots"]
    reasons = [
        f"{choices.weight_slots} weight, {choices.gradient_slots} gradient and {choices.state_slots} state buffers: "
        + ("enough to overlap everything" if wide else "more do not fit, so little overlaps")
    ]
    for name in ("gradients", "boundaries"):
        tier = getattr(choices, name)
        if getattr(request, name) is not None:
            why = "as configured"
        elif tier == Tier.DEVICE:
            why = "they fit in device memory"
        elif tier == Tier.HOST:
            why = "they fit in host memory"
        else:
            why = "they do not fit in host memory"
        reasons.append(f"{name} in {tier}: {why}")
    return reasons


def _too_small(plan: Plan, tier: str) -> MemoryBudgetError:
    needs = plan.device_bytes if tier == "device" else plan.host_bytes
    budget = plan.device_budget if tier == "device" else plan.host_budget
    largest = sorted(needs, key=lambda name: needs[name], reverse=True)[:4]
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(needs[name])}" for name in largest)
    return MemoryBudgetError(
        f"the run needs about {format_bytes(sum(needs.values()))} of {tier} memory and may use "
        f"{format_bytes(budget or 0)} (most of it: {parts}). Raise engine.{tier}_memory if there is more, or lower "
        f"training.micro_batch_size, data.sequence_length or training.micro_batches"
    )
