"""A matrix, cell by cell: systems take turns, and the file is written after each, so that what it holds stays."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Protocol

from greedysnake.bench.cells import Cell, Measured, Outcome, Setting, Status
from greedysnake.bench.check import wrong_cells
from greedysnake.bench.estimate import Estimator
from greedysnake.bench.measure import Place, code_digest, impossible, measure_cell
from greedysnake.bench.results import Results, save_results
from greedysnake.bench.systems import System
from greedysnake.report import wording
from greedysnake.units import format_bytes

_ENDS_SO_AGAIN: tuple[Status, ...] = ("refused", "out of memory")


class Screen(Protocol):
    """Where progress is shown."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def working(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        """Around something that takes long: what it is; and what to call with how far it is."""


def settings_of(
    models: Sequence[str],
    micro_batches: Sequence[int],
    memory: Sequence[int | None],
    disk: Sequence[int | None],
) -> list[Setting]:
    """Every combination."""
    return [
        Setting(model=model, micro_batches=count, memory=limit, disk=rate)
        for model, limit, rate, count in product(models, memory, disk, micro_batches)
    ]


def cells_of(settings: Sequence[Setting], systems: Sequence[System], runs: int) -> list[Cell]:
    """All cells in the order of measuring: systems take turns, and so do runs, so that what drifts hits all alike.

    Each run begins with the next system, so that none is always the first.
    """
    found = []
    for run in range(runs):
        first = run % max(1, len(systems))
        turn = [*systems[first:], *systems[:first]]
        found += [Cell(setting=setting, system=system.name, run=run) for setting in settings for system in turn]
    return found


def measure_matrix(
    results: Results,
    cells: Sequence[Cell],
    systems: Sequence[System],
    *,
    place: Place,
    estimator: Estimator,
    path: Path,
    screen: Screen,
) -> Results:
    """Measure the cells that are missing, and write the file after each.

    Args:
        results: so far.
        cells: all that there should be.
        systems: by whose names the cells go.
        place: where to measure.
        estimator: of the time it takes.
        path: of the file.
        screen: told what is done and how long the rest will take.

    Raises:
        GreedySnakeError: a limit cannot be set, a model cannot be made, or the file cannot be written.
    """
    by_name = {system.name: system for system in systems}
    for one in results.measured:
        if one.cell.system in by_name:
            estimator.learn(one, by_name[one.cell.system])
    missing = results.missing(cells)
    possible = {name: system for name, system in by_name.items() if not impossible(system, place)}
    screen.say(_outlook(cells, missing, _left(estimator, missing, possible)))
    if older := _of_other_code(results, cells):
        screen.say(
            f"{older} of these cells were measured by another version of GreedySnake: their times may not compare with "
            f"those measured now. Another --out measures them again."
        )
    for model in dict.fromkeys(cell.setting.model for cell in missing if cell.system in possible):
        with screen.working(f"{model}: first weights, the same for every system"):
            place.first_weights(model, results.method)
    given_up: set[tuple[Setting, str]] = {
        (one.cell.setting, one.cell.system) for one in results.measured if one.outcome.status in _ENDS_SO_AGAIN
    }
    for number, cell in enumerate(missing):
        left = wording.seconds(_left(estimator, missing[number:], possible))
        what = f"{number + 1}/{len(missing)}  {describe(cell)}"
        start, key = time.monotonic(), (cell.setting, cell.system)
        if key in given_up:
            outcome = Outcome(status="skipped", why="not run again: an earlier run of it did not fit")
        else:
            with screen.working(f"{what}  (about {left} left)") as progress:
                outcome = measure_cell(cell, by_name[cell.system], results.method, place, progress)
        if outcome.status in _ENDS_SO_AGAIN:
            given_up.add(key)
        one = Measured(cell=cell, outcome=outcome)
        results = results.with_measured(one)
        save_results(path, results)
        estimator.learn(one, by_name[cell.system])
        screen.say(f"{what}: {_ending(one, results, time.monotonic() - start)}")
    return results


def describe(cell: Cell) -> str:
    """A cell in a few words."""
    return f"{describe_setting(cell.setting)}, {cell.system}, run {cell.run + 1}"


def describe_setting(setting: Setting) -> str:
    """A line of the matrix in a few words."""
    parts = [Path(setting.model).stem if "/" in setting.model else setting.model, f"M = {setting.micro_batches}"]
    parts += [] if setting.memory is None else [format_bytes(setting.memory)]
    parts += [] if setting.disk is None else [f"disk {wording.rate(setting.disk)}"]
    return ", ".join(parts)


def _of_other_code(results: Results, cells: Sequence[Cell]) -> int:
    """How many of some cells that are measured were so by other code than this."""
    now, asked = code_digest(), set(cells)
    done = [one for one in results.measured if one.cell in asked and one.outcome.status == "done"]
    return sum(one.outcome.code != now for one in done)


def _left(estimator: Estimator, cells: Iterable[Cell], systems: dict[str, System]) -> float:
    return sum(estimator.seconds(cell, systems[cell.system]) for cell in cells if cell.system in systems)


def _outlook(cells: Sequence[Cell], missing: Sequence[Cell], seconds: float) -> str:
    if not missing:
        return f"All {len(cells)} cells are measured already."
    done = len(cells) - len(missing)
    before = f"{done} of {len(cells)} cells are measured already; the rest" if done else f"{len(cells)} cells"
    verb = "takes" if done else "take"
    return f"{before} {verb} about {wording.seconds(seconds)}, by the planner and what was measured so far."


def _ending(one: Measured, results: Results, seconds: float) -> str:
    outcome = one.outcome
    if outcome.status != "done":
        return f"{outcome.status}: {outcome.why}"
    counted = outcome.steps[results.method.uncounted :] or outcome.steps
    step = statistics.median(item.seconds for item in counted)
    wrong = wrong_cells(results.measured).get(one.cell)
    return f"{step:.3g} s a step, {seconds:.0f} s in all" + (f"; WRONG: {wrong}" if wrong else "")
