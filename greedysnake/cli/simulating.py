"""What ``greedysnake simulate`` does: one step with choices made by hand, and its picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from greedysnake.cli.planning import make_query
from greedysnake.errors import GreedySnakeError
from greedysnake.plan.given import GivenStep, refuse_options, simulate_given
from greedysnake.report.pictures import draw_timeline


def run_simulation(
    model: str, *, machine: str | None, fixed: dict[str, Any], overrides: Sequence[str], timeline: Path | None
) -> GivenStep:
    """Simulate a step, and draw it if a path is given.

    Raises:
        GreedySnakeError: the question has no answer, or the picture cannot be written.
    """
    refuse_options(fixed.get("schedule"), fixed)
    query = make_query(model, machine, fixed, overrides)
    found = simulate_given(query)
    if timeline is not None:
        layers = query.layers_per_unit or 1
        units = -(-query.workload.layers // layers)
        names = ["embedding", *(f"layer {layers * unit}" for unit in range(units)), "head"]
        title = f"Simulated: {query.workload.name}, {found.step.schedule.name}"
        try:
            draw_timeline(timeline, found.step.events(), names, title)
        except (OSError, ValueError) as error:
            raise GreedySnakeError(f"{timeline}: cannot be written: {error}") from error
    return found
