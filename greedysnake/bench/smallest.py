"""The smallest memory in which a system trains a model: found by bisection, each trial in a limit of its own."""

import math
from collections.abc import Callable
from pathlib import Path

from greedysnake.bench.cells import Cell, Data, Measured, Setting
from greedysnake.bench.matrix import Screen, describe
from greedysnake.bench.measure import Place, measure_cell
from greedysnake.bench.results import Results, save_results
from greedysnake.bench.systems import System
from greedysnake.units import format_bytes

LEAST_BYTES = 256 * 2**20
CLOSE = 1.06
"""The search ends when the smallest that worked is within this factor of the largest that did not."""
_STEP = 2**20


class Smallest(Data):
    """An answer.

    Attributes:
        model, micro_batches, disk: of the setting.
        system: name.
        works: bytes in which it trains; None: not even in the most that was tried, or it is not known.
        fails: the most bytes in which it did not; None: it works in the least that was tried, or it is not known.
        why: what happened there, or why the system was not tried at all.
    """

    model: str
    micro_batches: int
    disk: int | None
    system: str
    works: int | None
    fails: int | None
    why: str | None


def bisect(works: Callable[[int], bool], least: int, most: int) -> tuple[int | None, int | None]:
    """The smallest size that works and the largest that does not, within a factor of each other.

    Args:
        works: whether a size does; more never does worse.
        least, most: bytes to look between.
    """
    if not works(most):
        return None, most
    if works(least):
        return least, None
    low, high = least, most
    while high / low > CLOSE and high - low > _STEP:
        middle = round((low * high) ** 0.5 / _STEP) * _STEP
        if not low < middle < high:
            break
        low, high = (low, middle) if works(middle) else (middle, high)
    return high, low


def most_trials(least: int, most: int) -> int:
    """How many sizes :func:`bisect` looks at."""
    return 2 + max(0, math.ceil(math.log2(max(1.0, math.log(most / least) / math.log(CLOSE)))))


def find_smallest(
    results: Results,
    setting: Setting,
    system: System,
    *,
    most: int,
    place: Place,
    path: Path,
    screen: Screen,
) -> tuple[Results, Smallest]:
    """Find it; trials are cells of the file like any other, and those that it holds are not done again.

    Args:
        results: so far.
        setting: the setting; its memory is not looked at.
        system: to try.
        most: bytes to begin with.
        place: where to measure.
        path: of the file.
        screen: told each trial.

    Raises:
        GreedySnakeError: a limit cannot be set, or the file cannot be written.
    """
    why: dict[int, str] = {}
    skipped = False

    def works(size: int) -> bool:
        nonlocal results, skipped
        if skipped:
            return False
        cell = Cell(setting=setting.model_copy(update={"memory": size}), system=system.name)
        if results.missing([cell]):
            with screen.working(f"{describe(cell)}: does it train?") as progress:
                outcome = measure_cell(cell, system, results.method, place, progress)
            results = results.with_measured(Measured(cell=cell, outcome=outcome))
            save_results(path, results)
        found = results.outcome_of(cell)
        status, reason = (found.outcome.status, found.outcome.why) if found else ("failed", None)
        screen.say(f"{describe(cell)}: {'trains' if status == 'done' else status}")
        if status != "done":
            skipped = skipped or status not in ("refused", "out of memory")  # it says nothing of memory
            why[size] = f"{status}: {reason}"
        return status == "done"

    smallest, largest = bisect(works, min(LEAST_BYTES, most), most)
    answer = Smallest(
        model=setting.model,
        micro_batches=setting.micro_batches,
        disk=setting.disk,
        system=system.name,
        works=None if skipped else smallest,
        fails=None if skipped else largest,
        why=list(why.values())[-1] if skipped else why.get(largest or 0),
    )
    return results, answer


def in_words(answer: Smallest) -> str:
    """An answer for a person."""
    if answer.works is None:
        if answer.fails is None:
            return f"{answer.system}: not measured, {answer.why}"
        return f"{answer.system}: does not train in {format_bytes(answer.fails)}: {answer.why}"
    below = "the least tried" if answer.fails is None else f"not in {format_bytes(answer.fails)}"
    return f"{answer.system}: trains in {format_bytes(answer.works)} ({below})"
