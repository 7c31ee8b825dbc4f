"""Why each choice of a plan was made, in words."""

from greedysnake.plan.request import PlanRequest
from greedysnake.plan.slots import NARROW
from greedysnake.schedule import Choices, StepShape, Tier


def placement_reasons(choices: Choices, shape: StepShape, request: PlanRequest, wished_group: int | None) -> list[str]:
    """A line for each choice of where things go and when.

    Args:
        choices: that were made.
        shape: of the step.
        request: what the user fixed.
        wished_group: micro-batches that should go together if they fit.
    """
    return [*_group_reasons(choices, shape, request, wished_group), *_place_reasons(choices, request)]


def _group_reasons(choices: Choices, shape: StepShape, request: PlanRequest, wished_group: int | None) -> list[str]:
    """Why micro-batches go in groups, if they do."""
    together, count = choices.together(shape), shape.micro_batches
    if together == count or request.schedule == "horizontal":
        return []
    if request.group_size:
        why = "as configured, or as planned when the run began"
    else:
        why = "as planned" if choices.group_size == wished_group else "more do not fit"
    return [f"micro-batches in groups of {together} of {count}, each forward and backward before the next: {why}"]


def _place_reasons(choices: Choices, request: PlanRequest) -> list[str]:
    wide = choices.weight_slots > NARROW.weight_slots
    reasons = [
        f"{choices.weight_slots} weight, {choices.gradient_slots} gradient and {choices.state_slots} state buffers: "
        + ("enough to overlap everything" if wide else "more do not fit, so little overlaps")
    ]
    if request.gradients is not None:
        why = "as configured"
    elif request.hardware is not None:
        why = "as planned"
    else:
        why = "they fit in host memory" if choices.gradients == Tier.HOST else "they do not fit in host memory"
    reasons.append(f"gradients in {choices.gradients}: {why}")
    on_device, on_ssd = choices.boundaries_on_device, choices.boundaries_on_ssd
    shares = {Tier.DEVICE: on_device, Tier.HOST: 1 - on_device - on_ssd, Tier.SSD: on_ssd}
    where = ", ".join(f"{share:.0%} in {tier}" for tier, share in shares.items() if share > 1e-9)
    asked = request.boundaries_on_ssd is not None or request.boundaries_on_device is not None
    planned = "as much as fits in the faster memory" if request.hardware is None else "as planned"
    reasons.append(f"boundaries: {where}, " + ("as configured" if asked else planned))
    return reasons
