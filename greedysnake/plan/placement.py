"""Where everything of a step goes, decided before it runs, with the reason for each choice.

What a step should be like comes from the planner, or from a rule (:mod:`greedysnake.plan.wishes`); here it is done
as far as this process's memory allows, with the sizes of the real chunks.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from greedysnake.errors import MemoryBudgetError
from greedysnake.models.head_chunks import head_problem
from greedysnake.models.skeleton import Skeleton
from greedysnake.plan.activations import (
    KEPT_LEAVES,
    BatchShape,
    boundary_bytes,
    head_activation_bytes,
    paused_bytes,
    planned_head_tokens,
    unit_activation_bytes,
)
from greedysnake.plan.host import trim_heap
from greedysnake.plan.kept import kept_unit_bytes
from greedysnake.plan.model_sizes import activation_sizes
from greedysnake.plan.placement_reasons import placement_reasons
from greedysnake.plan.prediction import Prediction, predict
from greedysnake.plan.query import smaller_groups
from greedysnake.plan.request import PlanRequest
from greedysnake.plan.run_schedules import RunSchedules
from greedysnake.plan.slots import with_slots
from greedysnake.plan.wishes import Wish, host_budget, started_process_bytes, wish_for
from greedysnake.schedule import FITTED_POOLS, Choices, Pool, StepShape, Tier, step_pools
from greedysnake.units import format_bytes

_SHARE_STEPS = 20  # shares are multiples of a twentieth


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will happen in a step, where, and why.

    Attributes:
        batch: sizes of the step's batch.
        schedules: what a run does, and what that is built from.
        host_bytes, device_bytes: expected use of memory, by purpose.
        host_budget, device_budget: bytes that may be used; None for no limit.
        reasons: why each choice was made.
        head_chunk_tokens: tokens of a micro-batch whose logits exist at once; None: all.
        prediction: what a step will take; None where the machine's figures are not known.
    """

    batch: BatchShape
    schedules: RunSchedules
    host_bytes: dict[str, int]
    host_budget: int
    device_bytes: dict[str, int]
    device_budget: int | None
    reasons: tuple[str, ...]
    head_chunk_tokens: int | None = None
    prediction: Prediction | None = None

    @property
    def shape(self) -> StepShape:
        """Sizes of a step."""
        return self.schedules.shape

    @property
    def choices(self) -> Choices:
        """What was decided about a step."""
        return self.schedules.choices

    def fits_host(self) -> bool:
        """Whether host memory suffices."""
        return sum(self.host_bytes.values()) <= self.host_budget

    def leaves(self, share: float) -> bool:
        """Whether a share of the memory that may be used is left where computation is."""
        if not self.choices.separate_device:
            return sum(self.host_bytes.values()) <= (1 - share) * self.host_budget
        return self.device_budget is None or sum(self.device_bytes.values()) <= (1 - share) * self.device_budget

    def fits_device(self) -> bool:
        """Whether device memory suffices."""
        return self.device_budget is None or sum(self.device_bytes.values()) <= self.device_budget

    def as_json(self) -> dict[str, Any]:
        """The plan for ``plan.json``."""
        schedule = self.schedules.step(pending=True)
        moved = dict.fromkeys(("ssd_read", "ssd_write"), 0)
        for operation in schedule.operations:
            if operation.resource in moved:
                moved[operation.resource] += operation.bytes
        return {
            "schedule": self.schedules.name,
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
                "frozen_bytes": schedule.pools["ssd_frozen"].bytes,
                "boundary_bytes": schedule.pools["ssd_boundary"].bytes,
                "gradient_bytes": schedule.pools["held"].bytes if self.choices.gradients == Tier.SSD else 0,
                "read_bytes_per_step": moved["ssd_read"],
                "write_bytes_per_step": moved["ssd_write"],
            },
            "prediction": None if self.prediction is None else asdict(self.prediction),
            "reasons": list(self.reasons),
        }

    def _delayed_parameters_share(self) -> float:
        """The part of all parameters that is delayed, once α has been rounded to whole chunks of each unit."""
        units = self.shape.units
        delayed = sum(unit.chunks[c].gradient_bytes for unit in units for c in self.choices.delayed_chunks(unit))
        return delayed / sum(unit.gradient_bytes for unit in units)


def make_plan(skeleton: Skeleton, batch: BatchShape, request: PlanRequest, wish: Wish | None = None) -> Plan:
    """Place a step.

    Args:
        skeleton: the model, in its units.
        batch: sizes of the step's batch.
        request: what the user fixed, and the machine if it is known.
        wish: what the step should be like; None: found here.

    Raises:
        ConfigError: the machine's figures are those of another kind of machine.
        MemoryBudgetError: it does not fit, with what is needed, found, and could be changed.
    """
    trim_heap()  # what was freed before is not this plan's
    budget = host_budget(request)
    if wish is None:
        fixed = replace(request, layers_per_unit=len(skeleton.unit_layers[1]))
        wish = wish_for(skeleton, batch, fixed)
    found = wish
    head_tokens, head_reasons = _head_tokens(skeleton, batch, request)
    reasons = (
        f"host memory: {format_bytes(budget)}, "
        + ("what is free less a tenth" if request.host_memory is None else "as configured"),
        *found.reasons,
        *head_reasons,
    )
    shape = step_shape(skeleton, batch)
    if request.kept_activations != 0:
        shape = replace(shape, kept_bytes=kept_unit_bytes(skeleton, batch))

    sizes = activation_sizes(skeleton)
    computing = max(unit_activation_bytes(sizes, batch), head_activation_bytes(sizes, batch, head_tokens))
    process = started_process_bytes()

    def plan_with(choices: Choices) -> Plan:
        paused = paused_bytes(sizes, replace(batch, micro_batches=choices.together(shape)), head_tokens)
        host, device = _needs(skeleton, process, computing + paused, step_pools(request.schedule, shape, choices))
        return Plan(
            batch=batch,
            schedules=RunSchedules(name=request.schedule, shape=shape, choices=choices),
            host_bytes=host,
            host_budget=budget,
            device_bytes=device,
            device_budget=request.device_memory,
            reasons=(*reasons, *placement_reasons(choices, shape, request, found.group_size)),
            head_chunk_tokens=head_tokens,
        )

    together = _choices(request, found, Tier.HOST, found.group_size).together(shape)
    could_be_cut = request.group_size is None and request.schedule == "vertical"
    smaller = smaller_groups(together) if could_be_cut else []
    one_group: list[Plan] = []
    for group_size in (found.group_size, *smaller):
        tried: list[Plan] = []
        for slots, gradient_tier in product(found.slots, found.gradients):
            plan = plan_with(with_slots(_choices(request, found, gradient_tier, group_size), slots))
            tried.append(_with_boundaries(plan, plan_with, request, found))
            if tried[-1].fits_device() and tried[-1].fits_host():
                kept = _with_kept(tried[-1], plan_with, request, found)
                return _predicted(_fitted(_with_residents(kept, plan_with, request, found)), skeleton, request)
        for plan in map(_fitted, filter(_may_fit, reversed(tried))):  # the last ones need least
            if plan.fits_device() and plan.fits_host():
                return _predicted(plan, skeleton, request)
        one_group = one_group or tried
    # small groups need less for activations, and more for gradients that wait in between
    least = [_fitted(plan) for plan in ((one_group[-1], tried[-1]) if smaller else tried)]
    on_device = [plan for plan in least if plan.fits_device()]
    if not on_device:
        raise _too_small(min(least, key=lambda plan: sum(plan.device_bytes.values())), "device")
    raise _too_small(min(on_device, key=lambda plan: sum(plan.host_bytes.values())), "host")


def _choices(request: PlanRequest, wish: Wish, gradients: Tier, group_size: int | None) -> Choices:
    """What is wished, with one place for gradients and one size of groups, and nothing yet in memory that is left."""
    return Choices(
        delayed_share=wish.delayed_share,
        wait_for_norm=wish.delayed_share < 1 and (request.clipping or not request.can_take_back),
        separate_device=request.separate_device,
        boundaries_on_device=request.boundaries_on_device or 0.0,
        boundaries_on_ssd=wish.boundaries_on_ssd,
        boundaries_first=wish.boundaries_first,
        kept_activations=request.kept_activations or 0.0,
        gradients=gradients,
        group_size=1 if request.schedule == "horizontal" else group_size,
        snake=request.snake,
        overlap=request.overlap,
        resident_weights=request.resident_weights or 0.0,
        resident_state=request.resident_state or 0.0,
    )


def _fitted(plan: Plan) -> Plan:
    """The plan with the bytes that its schedules' pools really take, which may be fewer than it was chosen by."""
    host, device = dict(plan.host_bytes), dict(plan.device_bytes)
    for name, pool in plan.schedules.fitted_pools().items():
        needs = host if pool.tier == Tier.HOST else device
        if pool.tier != Tier.SSD and name in needs:
            needs[name] = pool.bytes
    return replace(plan, host_bytes=host, device_bytes=device)


def _may_fit(plan: Plan) -> bool:
    """Whether it could fit if its pools took as little as they might."""
    host, device = (
        {name: size for name, size in needs.items() if name not in FITTED_POOLS}
        for needs in (plan.host_bytes, plan.device_bytes)
    )
    rest = replace(plan, host_bytes=host, device_bytes=device)
    return rest.fits_host() and rest.fits_device()


def _predicted(plan: Plan, skeleton: Skeleton, request: PlanRequest) -> Plan:
    """The plan with what its steps will take, where the machine is known."""
    if request.hardware is None:
        return plan
    step = plan.schedules.step
    prediction = predict(
        request.hardware,
        skeleton,
        plan.batch,
        plan.shape,
        step,
        snapshot_every=request.snapshot_every,
        overlap=plan.choices.overlap,
    )
    return replace(plan, prediction=prediction)


def _with_boundaries(plan: Plan, plan_with: Callable[[Choices], Plan], request: PlanRequest, wish: Wish) -> Plan:
    """Keep boundaries on the device as far as wished and possible, then in host memory; the rest goes to SSD."""
    if request.boundaries_on_device is None and request.separate_device:
        most = min(wish.boundaries_on_device, 1 - plan.choices.boundaries_on_ssd)

        def on_device_plan(part: float) -> Plan:
            return plan_with(replace(plan.choices, boundaries_on_device=part * most))

        plan = on_device_plan(_largest(lambda part: on_device_plan(part).fits_device()))
    if request.boundaries_on_ssd is None:
        least = wish.boundaries_on_ssd
        most = 1 - plan.choices.boundaries_on_device - least

        def in_host_plan(part: float) -> Plan:
            return plan_with(replace(plan.choices, boundaries_on_ssd=least + (1 - part) * most))

        plan = in_host_plan(_largest(lambda part: in_host_plan(part).fits_host()))
    return plan


def _with_kept(plan: Plan, plan_with: Callable[[Choices], Plan], request: PlanRequest, wish: Wish) -> Plan:
    """Keep activations for the backward as far as wished and possible."""
    if request.kept_activations is not None or not plan.shape.kept_bytes:
        return plan
    most = wish.kept_activations
    at_once = len(plan.shape.keepers) * plan.choices.together(plan.shape)
    pairs = len(plan.shape.keepers) * plan.shape.micro_batches

    def kept_plan(part: float) -> Plan:
        return plan_with(replace(plan.choices, kept_activations=part * most))

    part = _largest(lambda part: kept_plan(part).leaves(KEPT_LEAVES), steps=max(1, at_once))
    plan = kept_plan(part)
    reason = (
        f"activations of {plan.choices.kept_count(plan.shape)} of {pairs} pairs of a unit and a micro-batch are kept"
    )
    why = "all" if plan.choices.kept_activations == 1 else "as many as fit" if most == 1 or part < 1 else "as planned"
    return replace(plan, reasons=(*plan.reasons, f"{reason} for the backward, those of others recomputed: {why}"))


def _with_residents(plan: Plan, plan_with: Callable[[Choices], Plan], request: PlanRequest, wish: Wish) -> Plan:
    """Fill what is left of host memory: with weights, which save three bytes of traffic a byte, then with state."""
    reasons: list[str] = []
    for name in ("resident_weights", "resident_state"):
        if getattr(request, name) is not None:
            continue
        most = getattr(wish, name)

        def resident_plan(part: float, plan: Plan = plan, name: str = name, most: float = most) -> Plan:
            if name == "resident_weights":
                return plan_with(replace(plan.choices, resident_weights=part * most))
            return plan_with(replace(plan.choices, resident_state=part * most))

        part = _largest(lambda part: resident_plan(part).fits_host())
        plan = resident_plan(part)
        why = "as much as fits" if most == 1 or part < 1 else "as planned"
        reasons.append(f"{part * most:.0%} of {name.removeprefix('resident_')} stays in host memory: {why}")
    return replace(plan, reasons=(*plan.reasons, *reasons))


def _largest(fits: Callable[[float], bool], steps: int = _SHARE_STEPS) -> float:
    """The largest share, in so many ``steps``, that fits; none where not even that does."""
    fewest, most = 0, steps
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if fits(middle / steps):
            fewest = middle
        else:
            most = middle - 1
    return fewest / steps


def step_shape(skeleton: Skeleton, batch: BatchShape) -> StepShape:
    """The sizes that schedules for this model and batch are built from."""
    structure = skeleton.structure
    return StepShape(
        units=tuple(
            layout.shape(backward_needs_weights=unit > 0 or structure.embedding_backward_needs_weights)
            for unit, layout in enumerate(skeleton.layouts)
        ),
        micro_batches=batch.micro_batches,
        boundary_bytes=boundary_bytes(activation_sizes(skeleton), batch),
        tied=structure.tied,
    )


def _head_tokens(skeleton: Skeleton, batch: BatchShape, request: PlanRequest) -> tuple[int | None, list[str]]:
    """Tokens whose logits exist at once, None for all of a micro-batch; and why."""
    asked, tokens = request.head_chunk_tokens, batch.rows * batch.tokens
    problem = head_problem(skeleton)
    if asked is None:
        chosen = planned_head_tokens(activation_sizes(skeleton), batch, request.configured_memory)
        why = "all at once would take too much memory"
    else:
        chosen, why = None if problem or asked >= tokens else asked, "as configured"
    if chosen is not None:
        return chosen, [f"logits of {chosen} tokens of {tokens} exist at once: {why}"]
    if asked is not None and asked < tokens and problem:
        return None, [f"logits of all {tokens} tokens of a micro-batch exist at once: {problem}"]
    return None, []


def _needs(
    skeleton: Skeleton, process: int, computing: int, pools: Mapping[str, Pool]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of host and of device memory by purpose."""
    largest_chunk = max(chunk.elements for layout in skeleton.layouts for chunk in layout.chunks)
    host = {"process": process, "master_weights": 4 * largest_chunk}
    device: dict[str, int] = {}
    (device if pools["activation"].tier == Tier.DEVICE else host)["computation"] = computing
    for pool_name, pool in pools.items():
        if pool.tier != Tier.SSD and pool.bytes:
            (host if pool.tier == Tier.HOST else device)[pool_name] = pool.bytes
    return host, device


def _too_small(plan: Plan, tier: str) -> MemoryBudgetError:
    needs = plan.device_bytes if tier == "device" else plan.host_bytes
    budget = plan.device_budget if tier == "device" else plan.host_budget
    largest = sorted(needs, key=lambda name: needs[name], reverse=True)[:4]
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(needs[name])}" for name in largest)
    needed, allowed = sum(needs.values()), budget or 0
    return MemoryBudgetError(
        f"the run needs about {format_bytes(needed)} of {tier} memory and may use {format_bytes(allowed)}, "
        f"{format_bytes(needed - allowed)} short (most of it: {parts}). Raise engine.{tier}_memory if there is more, "
        f"or lower training.micro_batch_size, data.sequence_length or "
        + ("engine.group_size" if plan.choices.together(plan.shape) > 1 else "training.micro_batches")
    )
