"""How many buffers of each kind a step may have: they bound how far I/O runs ahead."""

from dataclasses import replace

from greedysnake.schedule import Choices

DEEP = Choices(weight_slots=4, gradient_slots=3, state_slots=12)
"""Reads run two units ahead, so that a disk about as fast as the computation never waits for either."""
WIDE = Choices(weight_slots=3, gradient_slots=2, state_slots=4)
"""Buffers for one unit in use, one arriving, one leaving; a gradient in use and one that is being applied."""
NARROW = Choices(weight_slots=2, gradient_slots=1, state_slots=2)
"""The least: little overlaps, but it runs."""

SLOTS = (DEEP, WIDE, NARROW)
"""From the most buffers to the fewest."""


def with_slots(choices: Choices, slots: Choices) -> Choices:
    """``choices`` with as many buffers of each kind as ``slots`` has."""
    return replace(
        choices,
        weight_slots=slots.weight_slots,
        gradient_slots=slots.gradient_slots,
        state_slots=slots.state_slots,
    )
