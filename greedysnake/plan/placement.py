"""Where everything of a step goes, decided before it runs, with the reason for each choice.

Only what moves the fewest bytes is preferred here: gradients that wait for their update and boundaries
stay in host memory if they fit, and go to SSD if they do not.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from greedysnake.errors import MemoryBudgetError
from greedysnake.models.head_chunks import head_problem
from greedysnake.models.skeleton import Skeleton
from greedysnake.plan.activations import (
    BatchShape,
    boundary_bytes,
    head_activation_bytes,
    paused_bytes,
    planned_head_tokens,
    unit_activation_bytes,
)
from greedysnake.plan.host import process_bytes, usable_bytes
from greedysnake.plan.slots import DEEP, NARROW, WIDE, with_slots
from greedysnake.schedule import BUILDERS, Choices, Schedule, StepShape, Tier, step_pools
from greedysnake.units import format_bytes

_SLOTS = (DEEP, WIDE, NARROW)  # the first that fits

_START_BYTES = 32 * 2**20  # what a process gains with its first step: code paths, thread stacks
_SHARE_STEPS = 20  # shares are multiples of a twentieth


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user fixed; None leaves it to the plan.

    Attributes:
        schedule: ``"vertical"`` or ``"horizontal"``.
        delayed_share: α.
        snake: whether every other unit takes the micro-batches in reverse.
        overlap: whether operations of different resources run at the same time.
        boundaries_on_device, boundaries_on_ssd: shares of the boundaries that wait for the backward there.
        gradients: tier.
        host_memory: bytes that the process may use.
        separate_device: whether computation has memory of its own.
        device_memory: bytes of it that may be used, None for no limit.
        clipping: whether the gradient's norm is limited.
        can_take_back: whether what a step wrote can be taken back while its norm is not known.
        resident_weights, resident_state: shares that stay in host memory; None: as much as fits.
        head_chunk_tokens: tokens of a micro-batch whose logits exist at once; None: planned.
        configured_memory: bytes that computation is told to use, whatever is free; None: not told.
    """

    schedule: str = "vertical"
    delayed_share: float | None = None
    snake: bool = True
    overlap: bool = True
    boundaries_on_device: float | None = None
    boundaries_on_ssd: float | None = None
    gradients: Tier | None = None
    host_memory: int | None = None
    separate_device: bool = False
    device_memory: int | None = None
    clipping: bool = False
    can_take_back: bool = True
    resident_weights: float | None = 0.0
    resident_state: float | None = 0.0
    head_chunk_tokens: int | None = None
    configured_memory: int | None = None


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
        head_chunk_tokens: tokens of a micro-batch whose logits exist at once; None: all.
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
    head_chunk_tokens: int | None = None

    def fits_host(self) -> bool:
        """Whether host memory suffices."""
        return sum(self.host_bytes.values()) <= self.host_budget

    def fits_device(self) -> bool:
        """Whether device memory suffices."""
        return self.device_budget is None or sum(self.device_bytes.values()) <= self.device_budget

    def build(self, *, pending: bool, snapshot: bool = False) -> Schedule:
        """The schedule of a step; ``pending`` and ``snapshot`` as the builders have it."""
        return BUILDERS[self.schedule](self.shape, self.choices, pending=pending, snapshot=snapshot)

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
            "head_chunk_tokens": self.head_chunk_tokens,
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
    shape = step_shape(skeleton, batch)
    head_tokens, why = _head_tokens(skeleton, batch, request)
    reasons += why

    def plan_with(choices: Choices) -> Plan:
        computing = max(unit_activation_bytes(skeleton, batch), head_activation_bytes(skeleton, batch, head_tokens))
        computing += paused_bytes(skeleton, batch, head_tokens)
        host, device = _needs(skeleton, computing, request.schedule, shape, choices)
        return Plan(
            batch=batch,
            schedule=request.schedule,
            shape=shape,
            choices=choices,
            host_bytes=host,
            host_budget=budget,
            device_bytes=device,
            device_budget=request.device_memory,
            reasons=(*reasons, *_placement_reasons(choices, request)),
            head_chunk_tokens=head_tokens,
        )

    tried: list[Plan] = []
    for slots in _SLOTS:
        for gradient_tier in [request.gradients] if request.gradients else [Tier.HOST, Tier.SSD]:
            choices = Choices(
                delayed_share=share,
                wait_for_norm=share < 1 and (request.clipping or not request.can_take_back),
                separate_device=request.separate_device,
                boundaries_on_device=request.boundaries_on_device or 0.0,
                boundaries_on_ssd=request.boundaries_on_ssd or 0.0,
                gradients=gradient_tier,
                snake=request.snake,
                overlap=request.overlap,
                resident_weights=request.resident_weights or 0.0,
                resident_state=request.resident_state or 0.0,
            )
            plan = plan_with(with_slots(choices, slots))
            tried.append(_with_boundaries(plan, plan_with, request))
            if tried[-1].fits_device() and tried[-1].fits_host():
                return _with_residents(tried[-1], plan_with, request)
    on_device = [plan for plan in tried if plan.fits_device()]
    if not on_device:
        raise _too_small(min(tried, key=lambda plan: sum(plan.device_bytes.values())), "device")
    raise _too_small(min(on_device, key=lambda plan: sum(plan.host_bytes.values())), "host")


def _with_boundaries(plan: Plan, plan_with: Callable[[Choices], Plan], request: PlanRequest) -> Plan:
    """Keep boundaries on the device as far as they fit, then in host memory; the rest goes to SSD."""
    on_ssd, on_device = request.boundaries_on_ssd, request.boundaries_on_device
    if on_device is None and request.separate_device:
        most = 1 - (on_ssd or 0.0)

        def on_device_plan(part: float) -> Plan:
            return plan_with(replace(plan.choices, boundaries_on_device=part * most))

        plan = on_device_plan(_largest(lambda part: on_device_plan(part).fits_device()))
    if on_ssd is None:
        most = 1 - plan.choices.boundaries_on_device

        def in_host_plan(part: float) -> Plan:
            return plan_with(replace(plan.choices, boundaries_on_ssd=(1 - part) * most))

        plan = in_host_plan(_largest(lambda part: in_host_plan(part).fits_host()))
    return plan


def _with_residents(plan: Plan, plan_with: Callable[[Choices], Plan], request: PlanRequest) -> Plan:
    """Fill what is left of host memory: with weights, which save three bytes of traffic a byte, then with state."""
    reasons: list[str] = []
    for name in ("resident_weights", "resident_state"):
        if getattr(request, name) is not None:
            continue

        def resident_plan(part: float, plan: Plan = plan, name: str = name) -> Plan:
            if name == "resident_weights":
                return plan_with(replace(plan.choices, resident_weights=part))
            return plan_with(replace(plan.choices, resident_state=part))

        part = _largest(lambda part: resident_plan(part).fits_host())
        plan = resident_plan(part)
        reasons.append(f"{part:.0%} of {name.removeprefix('resident_')} stays in host memory: as much as fits")
    return replace(plan, reasons=(*plan.reasons, *reasons))


def _largest(fits: Callable[[float], bool]) -> float:
    """The largest share that fits; none where not even that does."""
    fewest, most = 0, _SHARE_STEPS
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if fits(middle / _SHARE_STEPS):
            fewest = middle
        else:
            most = middle - 1
    return fewest / _SHARE_STEPS


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


def _head_tokens(skeleton: Skeleton, batch: BatchShape, request: PlanRequest) -> tuple[int | None, list[str]]:
    """Tokens whose logits exist at once, None for all of a micro-batch; and why."""
    asked, tokens = request.head_chunk_tokens, batch.rows * batch.tokens
    problem = head_problem(skeleton)
    if asked is None:
        chosen = planned_head_tokens(skeleton, batch, request.configured_memory)
        why = "all at once would take too much memory"
    else:
        chosen, why = None if problem or asked >= tokens else asked, "as configured"
    if chosen is not None:
        return chosen, [f"logits of {chosen} tokens of {tokens} exist at once: {why}"]
    if asked is not None and asked < tokens and problem:
        return None, [f"logits of all {tokens} tokens of a micro-batch exist at once: {problem}"]
    return None, []


def _needs(
    skeleton: Skeleton, computing: int, name: str, shape: StepShape, choices: Choices
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of host and of device memory by purpose."""
    pools = step_pools(name, shape, choices)
    largest_chunk = max(chunk.elements for layout in skeleton.layouts for chunk in layout.chunks)
    host = {"process": process_bytes() + _START_BYTES, "master_weights": 4 * largest_chunk}
    device: dict[str, int] = {}
    (device if choices.separate_device else host)["computation"] = computing
    for pool_name, pool in pools.items():
        if pool.tier != Tier.SSD and pool.bytes:
            (host if pool.tier == Tier.HOST else device)[pool_name] = pool.bytes
    return host, device


def _placement_reasons(choices: Choices, request: PlanRequest) -> list[str]:
    wide = choices.weight_slots > NARROW.weight_slots
    reasons = [
        f"{choices.weight_slots} weight, {choices.gradient_slots} gradient and {choices.state_slots} state buffers: "
        + ("enough to overlap everything" if wide else "more do not fit, so little overlaps")
    ]
    if request.gradients is not None:
        why = "as configured"
    else:
        why = "they fit in host memory" if choices.gradients == Tier.HOST else "they do not fit in host memory"
    reasons.append(f"gradients in {choices.gradients}: {why}")
    on_device, on_ssd = choices.boundaries_on_device, choices.boundaries_on_ssd
    shares = {Tier.DEVICE: on_device, Tier.HOST: 1 - on_device - on_ssd, Tier.SSD: on_ssd}
    where = ", ".join(f"{share:.0%} in {tier}" for tier, share in shares.items() if share > 1e-9)
    asked = request.boundaries_on_ssd is not None or request.boundaries_on_device is not None
    reasons.append(f"boundaries: {where}, " + ("as configured" if asked else "as much as fits in the faster memory"))
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
