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
    """One optimizer step with every micro-batch of a group through a unit before any goes through the next.

    With one group, a unit's weights cross SSD once in the forward and once in the backward, and its gradient is
    complete, once, when its backward ends. Every other visit takes the micro-batches in reverse (the snake), so the
    activation produced last is used first. Source: GreedySnake paper, arXiv 2512.17570.

    With several, one goes forward and backward after the other: only one's boundaries exist at a time, weights cross
    once more in each direction for each group, and partial gradients are put away and brought back in between.

    Args:
        shape: sizes of the step.
        choices: what the plan decided.
        pending: whether the step before left delayed gradients.
        snapshot: whether the state after the step before is committed on the way.
    """
    schedule = _build_groups("vertical", shape, choices, pending=pending, snapshot=snapshot)
    if not choices.boundaries_first:
        return schedule
    return replace(schedule, operations=let_boundaries_pass(schedule.operations, choices.together(shape)))


def build_horizontal(shape: StepShape, choices: Choices, *, pending: bool, snapshot: bool = False) -> Schedule:
    """One optimizer step with every unit visited by one micro-batch before the next begins: groups of one.

    The order of ZeRO-Infinity and of plain gradient accumulation: weights cross SSD twice for every
    micro-batch, and partial gradients are put away and brought back in between.

    Args:
        shape: sizes of the step.
        choices: what the plan decided, but for its groups.
        pending: whether the step before left delayed gradients.
        snapshot: whether the state after the step before is committed on the way.
    """
    alone = replace(choices, group_size=1)
    return _build_groups("horizontal", shape, alone, pending=pending, snapshot=snapshot)


def _build_groups(name: str, shape: StepShape, choices: Choices, *, pending: bool, snapshot: bool) -> Schedule:
    """One group of micro-batches after another through all units, forward and backward."""
    build = ScheduleBuilder(shape, choices, pending=pending, snapshot=snapshot)
    passes = Passes(build)
    head, groups = build.units - 1, choices.groups(shape)

    def order(group: range, visit: int) -> range:
        return group[::-1] if choices.snake and visit % 2 else group

    for group in groups:
        first, last = group is groups[0], group is groups[-1]
        for unit in range(head):
            passes.forward(unit, order(group, unit), first=first)
        passes.head(order(group, head), first=first, last=last)
        for unit in reversed(range(shape.first_trained, head)):
            passes.backward(unit, order(group, 2 * head - unit), first=first, last=last)
    build.finish_step()
    return build.build(name)


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
    build = ScheduleBuilder(shape, replace(choices, group_size=None), pending=False)
    passes = Passes(build)
    order = range(shape.micro_batches)
    for unit in range(build.units - 1):
        passes.forward(unit, order, first=False, keep=False)
    passes.loss(order)
    return build.build("evaluation")


def step_pools(name: str, shape: StepShape, choices: Choices) -> dict[str, Pool]:
    """The memory of the schedule called ``name``, without building the schedule."""
    return make_pools(shape, replace(choices, group_size=1) if name == "horizontal" else choices)


BUILDERS: dict[str, Callable[..., Schedule]] = {"vertical": build_vertical, "horizontal": build_horizontal}
