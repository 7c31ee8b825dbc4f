"""The schedules: the order in which units and micro-batches meet."""

from collections.abc import Callable
from dataclasses import replace

from greedysnake.schedule.builder import ScheduleBuilder
from greedysnake.schedule.interleave import let_boundaries_pass
from greedysnake.schedule.operations import Pool, Schedule
from greedysnake.schedule.passes import Passes
from greedysnake.schedule.pools import make_pools
from greedysnake.schedule.shape import Choices, StepShape


def build_vertical(shape: StepShape, choices: Choices, *, pending: bool, snapshot: bool = False) -> Schedule:
    """One optimizer step with every micro-batch through a unit before any goes through the next.

    A unit's weights cross SSD once in the forward and once in the backward, and its gradient is complete,
    once, when its backward ends. Every other visit takes the micro-batches in reverse (the snake), so the
    activation produced last is used first. Source: GreedySnake paper, arXiv 2512.17570.

    Args:
        shape: sizes of the step.
        choices: what the plan decided.
        pending: whether the step before left delayed gradients.
        snapshot: whether the state after the step before is committed on the way.
    """
    build = ScheduleBuilder(shape, choices, pending=pending, snapshot=snapshot)
    passes = Passes(build)
    natural = list(range(shape.micro_batches))

    def order(visit: int) -> list[int]:
        return natural[::-1] if choices.snake and visit % 2 else natural

    head = build.units - 1
    for unit in range(head):
        passes.forward(unit, order(unit), first=True)
    passes.head(order(head), first=True, last=True)
    for unit in reversed(range(shape.first_trained, head)):
        passes.backward(unit, order(2 * head - unit), first=True, last=True)
    build.finish_step()
    schedule = build.build("vertical")
    if not choices.boundaries_first:
        return schedule
    return replace(schedule, operations=let_boundaries_pass(schedule.operations, shape.micro_batches))


def build_horizontal(shape: StepShape, choices: Choices, *, pending: bool, snapshot: bool = False) -> Schedule:
    """One optimizer step with every unit visited by one micro-batch before the next begins.

    The order of ZeRO-Infinity and of plain gradient accumulation: weights cross SSD twice for every
    micro-batch, and partial gradients are put away and brought back in between.

    Args:
        shape: sizes of the step.
        choices: what the plan decided.
        pending: whether the step before left delayed gradients.
        snapshot: whether the state after the step before is committed on the way.
    """
    build = ScheduleBuilder(shape, choices, pending=pending, partial_sums=shape.micro_batches > 1, snapshot=snapshot)
    passes = Passes(build)
    head = build.units - 1
    for m in range(shape.micro_batches):
        first, last = m == 0, m == shape.micro_batches - 1
        for unit in range(head):
            passes.forward(unit, [m], first=first)
        passes.head([m], first=first, last=last)
        for unit in reversed(range(shape.first_trained, head)):
            passes.backward(unit, [m], first=first, last=last)
    build.finish_step()
    return build.build("horizontal")


def build_flush(shape: StepShape, choices: Choices) -> Schedule:
    """The delayed updates alone: what is left to do after the last step."""
    build = ScheduleBuilder(shape, choices, pending=True)
    for unit, sizes in enumerate(shape.units):
        if choices.delayed_chunks(sizes):
            build.load_weights(unit)
            build.update_delayed(unit)
            build.drop_weights(unit)
    return build.build("flush")


def build_evaluation(shape: StepShape, choices: Choices) -> Schedule:
    """Loss of micro-batches, without gradients; no update may be pending."""
    build = ScheduleBuilder(shape, choices, pending=False)
    passes = Passes(build)
    order = list(range(shape.micro_batches))
    for unit in range(build.units - 1):
        passes.forward(unit, order, first=False, keep=False)
    passes.loss(order)
    return build.build("evaluation")


def step_pools(name: str, shape: StepShape, choices: Choices) -> dict[str, Pool]:
    """The memory of the schedule called ``name``, without building the schedule."""
    partial_sums = name == "horizontal" and shape.micro_batches > 1
    return make_pools(shape, choices, holds_all=partial_sums or choices.wait_for_norm, one_by_one=partial_sums)


BUILDERS: dict[str, Callable[..., Schedule]] = {"vertical": build_vertical, "horizontal": build_horizontal}
