"""What a training step should be like, before this process's memory has its say.

Where the machine's figures are known (``greedysnake probe``), the planner's search says it, as ``greedysnake plan``
does; where they are not, a rule that moves the fewest bytes. What the user fixed stays in either.
"""

from dataclasses import dataclass, replace

from greedysnake.errors import ConfigError, MemoryBudgetError
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import DTYPES, describe_skeleton
from greedysnake.plan.hardware import Hardware
from greedysnake.plan.host import process_bytes, usable_bytes
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.request import PlanRequest
from greedysnake.plan.search import search
from greedysnake.plan.slots import SLOTS
from greedysnake.plan.workload import Workload
from greedysnake.schedule import Choices, Tier

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_START_BYTES = 32 * 2**20
"""What a process gains with its first step: code paths, thread stacks."""
_ANY_DISK = 2**62
"""Disk is not the planner's to judge in training: the store reserves all of it before the first step, or says what
it lacks."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Choices to be made as far as they fit.

    Attributes:
        delayed_share: α.
        layers_per_unit: decoder layers loaded and computed as one.
        group_size: micro-batches that go through the units together; None: all.
        slots: numbers of buffers, the first that fit.
        gradients: tiers for gradients that wait, the first that fits.
        boundaries_on_device: share that stays on the device, or less.
        boundaries_on_ssd: share that goes to SSD, or more.
        boundaries_first: whether updates make way for those.
        kept_activations: share that is kept for the backward, or less.
        resident_weights, resident_state: shares that stay in host memory, or less.
        reasons: why.
    """

    delayed_share: float
    layers_per_unit: int
    group_size: int | None
    slots: tuple[Choices, ...]
    gradients: tuple[Tier, ...]
    boundaries_on_device: float
    boundaries_on_ssd: float
    boundaries_first: bool
    kept_activations: float
    resident_weights: float
    resident_state: float
    reasons: tuple[str, ...]


def wish_for(skeleton: Skeleton, batch: BatchShape, request: PlanRequest) -> Wish:
    """What a step should be like.

    Args:
        skeleton: the model.
        batch: sizes of the step's batch.
        request: what the user fixed, and the machine if it is known.

    Raises:
        ConfigError: the machine's figures are those of another kind of machine.
    """
    if request.hardware is None:
        return by_rule(request)
    if request.schedule != "vertical":
        return replace(by_rule(request), reasons=("by rule: the planner places vertical schedules only",))
    try:
        return by_search(skeleton, batch, request, request.hardware)
    except MemoryBudgetError:
        why = "by rule: nothing fits as the planner counts, for which each buffer is as large as the largest unit"
        return replace(by_rule(request), reasons=(why,))


def by_rule(request: PlanRequest) -> Wish:
    """As few bytes as can be moved, and everything in the fastest memory that it fits in."""
    share = request.delayed_share
    reasons = ["by rule, as the machine's figures are not known: greedysnake probe measures them"]
    if share is None:
        share = 1.0 if request.clipping else 0.0
        reasons.append(
            "delayed share 1: clipping needs the norm of the whole gradient, so updates wait for the next forward"
            if request.clipping
            else "delayed share 0: without clipping each unit is updated as soon as its gradient is complete"
        )
    return Wish(
        delayed_share=share,
        layers_per_unit=request.layers_per_unit or 1,
        group_size=request.group_size,
        slots=SLOTS,
        gradients=(request.gradients,) if request.gradients else (Tier.HOST, Tier.SSD),
        boundaries_on_device=_or(request.boundaries_on_device, 1.0 if request.separate_device else 0.0),
        boundaries_on_ssd=_or(request.boundaries_on_ssd, 0.0),
        boundaries_first=True,
        kept_activations=_or(request.kept_activations, 1.0),
        resident_weights=_or(request.resident_weights, 1.0),
        resident_state=_or(request.resident_state, 1.0),
        reasons=tuple(reasons),
    )


def by_search(skeleton: Skeleton, batch: BatchShape, request: PlanRequest, hardware: Hardware) -> Wish:
    """What the planner's search finds for this machine."""
    found = search(training_query(skeleton, batch, request, hardware))
    choices = found.case.choices
    # where the real chunks and this process leave less room, fewer buffers
    slots = tuple(one for one in SLOTS if one.state_slots <= choices.state_slots)
    return Wish(
        delayed_share=choices.delayed_share,
        layers_per_unit=found.case.layers_per_unit,
        group_size=choices.group_size,
        slots=slots,
        gradients=(request.gradients,) if request.gradients else tuple(dict.fromkeys((choices.gradients, Tier.SSD))),
        boundaries_on_device=choices.boundaries_on_device,
        boundaries_on_ssd=choices.boundaries_on_ssd,
        boundaries_first=choices.boundaries_first,
        kept_activations=choices.kept_activations,
        resident_weights=choices.resident_weights,
        resident_state=choices.resident_state,
        reasons=(
            f"from the figures of {hardware.name}: a linear program and simulated steps",
            f"delayed share {choices.delayed_share:g}: "
            + ("as configured" if request.delayed_share is not None else "the shortest simulated step"),
        ),
    )


def training_query(skeleton: Skeleton, batch: BatchShape, request: PlanRequest, hardware: Hardware) -> PlanQuery:
    """The planner's question for a training run: the batch is given, memory is what this process may use."""
    if hardware.separate_device != request.separate_device:
        has, run = ("an accelerator", "no") if hardware.separate_device else ("no accelerator", "one")
        raise ConfigError(
            f"engine.hardware: {hardware.name} has {has} with memory of its own, and this run computes on {run} such "
            f"device; measure this machine with greedysnake probe, with the run's settings as --config"
        )
    changes: dict[str, object] = {
        "host_memory": host_budget(request),
        "disks": tuple(disk.model_copy(update={"capacity": _ANY_DISK}) for disk in hardware.disks),
    }
    if request.separate_device and request.device_memory is not None:
        changes["device_memory"] = request.device_memory
    query = request.query(layer_workload(skeleton), hardware.model_copy(update=changes), batch)
    return replace(query, process_bytes=started_process_bytes())


def host_budget(request: PlanRequest) -> int:
    """Bytes of host memory that the process may use."""
    return usable_bytes() if request.host_memory is None else request.host_memory


def started_process_bytes() -> int:
    """Bytes that the process takes beside the step's buffers."""
    return process_bytes() + _START_BYTES


def layer_workload(skeleton: Skeleton) -> Workload:
    """The model's sizes layer by layer, whatever its units are."""
    if any(len(layers) > 1 for layers in skeleton.unit_layers):
        slots = [] if skeleton.lora else [slot for layout in skeleton.layouts for slot in layout.parameters]
        skeleton = build_skeleton(
            skeleton.model.config,
            dtype=skeleton.model.dtype,
            chunk_elements=max(chunk.elements for layout in skeleton.layouts for chunk in layout.chunks),
            split_master=all(chunk.split_master for layout in skeleton.layouts for chunk in layout.chunks),
            frozen=[slot.name for slot in slots if not slot.trainable],
            lora=skeleton.lora,
        )
    return describe_skeleton(skeleton, dtype=_DTYPE_NAMES[skeleton.model.dtype])


def _or(share: float | None, otherwise: float) -> float:
    return otherwise if share is None else share
