"""The memory that a schedule happens in: which pools there are, and how large."""

from collections.abc import Iterable

from greedysnake.schedule.operations import Pool, Tier
from greedysnake.schedule.shape import Choices, StepShape

SHARED_POOLS = (
    "weights",
    "gradient",
    "state",
    "gradient_chunk",
    "device_weights",
    "device_gradient",
    "activation",
    "boundary",
    "kept_activation",
)
"""Pools whose slots serve one content after another; a slot of any other pool has one purpose."""


def make_pools(shape: StepShape, choices: Choices) -> dict[str, Pool]:
    """Pools by name.

    Args:
        shape: sizes of the step.
        choices: what the plan decided.
    """
    together = choices.together(shape)
    # whether every chunk's gradient is put away at some time, not only those of delayed chunks
    holds_all = choices.wait_for_norm or together < shape.micro_batches
    chunks = [chunk for unit in shape.units for chunk in unit.chunks]
    largest_weights = max(unit.weight_bytes for unit in shape.units)
    largest_gradient = max(unit.gradient_bytes for unit in shape.units)
    largest_state = max((chunk.state_bytes for chunk in chunks), default=0)
    largest_chunk = max((chunk.gradient_bytes for chunk in chunks), default=0)
    held = tuple(
        chunk.gradient_bytes if holds_all or index in choices.delayed_chunks(unit) else 0
        for unit in shape.units
        for index, chunk in enumerate(unit.chunks)
    )
    on_ssd = choices.gradients == Tier.SSD
    needed_from = shape.first_trained - 1  # the backward ends there, so earlier boundaries are not kept
    tiers = [choices.boundary_tier(unit, len(shape.units)) for unit in range(len(shape.units) - 1)]
    leaving = [tier for tier in tiers[max(0, needed_from) :] if tier != choices.compute_tier]
    staying = len(tiers) - max(0, needed_from) - len(leaving)
    # where they leave, those of two units are there at once: one that arrives, one that is made
    activations = staying + (2 if staying < len(tiers) else 0)
    waiting_in_host = leaving.count(Tier.HOST) * together + (4 if Tier.SSD in leaving else 0)
    weight_slots = max(choices.weight_slots, 2 if shape.tied else 1)
    device_gradients = choices.gradient_slots + shape.tied_gradient

    def host(size: int, slots: int) -> Pool:
        return Pool(tier=Tier.HOST, slot_bytes=(size,) * slots)

    def compute(size: int, slots: int) -> Pool:
        return Pool(tier=choices.compute_tier, slot_bytes=(size,) * slots)

    def device(size: int, slots: int) -> Pool:
        return Pool(tier=Tier.DEVICE, slot_bytes=(size,) * (slots if choices.separate_device else 0))

    def ssd(slot_bytes: Iterable[int]) -> Pool:
        return Pool(tier=Tier.SSD, slot_bytes=tuple(slot_bytes))

    return {
        "weights": host(largest_weights, weight_slots),
        "gradient": host(largest_gradient, choices.gradient_slots),
        "state": host(largest_state, choices.state_slots),
        "gradient_chunk": host(largest_chunk, choices.state_slots if on_ssd else 0),
        "tied_gradient": host(shape.units[0].gradient_bytes, int(shape.tied_gradient)),
        "norm": host(8, len(shape.units) + 1),
        "device_weights": device(largest_weights, weight_slots),
        "device_gradient": device(largest_gradient, device_gradients),
        "activation": compute(shape.boundary_bytes, activations * together),
        "boundary_gradient": compute(shape.boundary_bytes, together),
        "boundary": host(shape.boundary_bytes, waiting_in_host),
        "kept_activation": compute(shape.kept_bytes, choices.kept_at_once(shape)),
        "held": ssd(held) if on_ssd else Pool(tier=Tier.HOST, slot_bytes=held),
        "resident_weights": Pool(
            tier=Tier.HOST,
            slot_bytes=tuple(
                sizes.weight_bytes if choices.weights_resident(unit) else 0 for unit, sizes in enumerate(shape.units)
            ),
        ),
        "resident_state": Pool(
            tier=Tier.HOST,
            slot_bytes=tuple(
                chunk.state_bytes if choices.state_resident(index, len(sizes.chunks)) else 0
                for sizes in shape.units
                for index, chunk in enumerate(sizes.chunks)
            ),
        ),
        "ssd_weights": ssd(chunk.weight_bytes for chunk in chunks),
        "ssd_state": ssd(chunk.state_bytes for chunk in chunks),
        "ssd_frozen": ssd(unit.frozen_weight_bytes for unit in shape.units),
        "ssd_boundary": ssd(
            shape.boundary_bytes if tier == Tier.SSD and unit >= needed_from else 0
            for unit, tier in enumerate(tiers)
            for _ in range(together)
        ),
    }
