"""Cells as lines of a table: medians over runs, with their spread, and what went wrong."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from greedysnake.bench.cells import Measured, Method, Outcome, Setting, StepNumbers
from greedysnake.bench.check import wrong_cells
from greedysnake.bench.matrix import describe_setting
from greedysnake.bench.results import Results
from greedysnake.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median, with the least and the most of some runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of some values, at least one."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One system in one setting.

    Attributes:
        setting: the setting.
        system: name.
        runs: that were done.
        step_seconds, tokens_per_second: of each run, the median of its counted steps; None: no run was done.
        peak_memory_bytes: most that the kernel charged in any run; the process's own where it did not count.
        read_bytes, written_bytes: of a counted step, median.
        problem: why there is no number, or why it is not to be trusted.
        wrong: whether its losses differ from the others'.
    """

    setting: Setting
    system: str
    runs: int
    step_seconds: Spread | None
    tokens_per_second: Spread | None
    peak_memory_bytes: int | None
    read_bytes: float | None
    written_bytes: float | None
    problem: str | None
    wrong: bool = False


def table_lines(results: Results, systems: Sequence[str], settings: Sequence[Setting] | None = None) -> list[Line]:
    """A line for each setting and system that has a cell.

    Args:
        results: what was measured.
        systems: names, in the order wanted.
        settings: those wanted, in order; None: all.
    """
    wrong = wrong_cells(results.measured)
    lines = []
    for setting in settings if settings is not None else dict.fromkeys(one.cell.setting for one in results.measured):
        for system in systems:
            ones = [one for one in results.measured if one.cell.setting == setting and one.cell.system == system]
            if ones:
                lines.append(_line(setting, system, ones, results.method, [wrong.get(one.cell) for one in ones]))
    return lines


def _line(setting: Setting, system: str, ones: Sequence[Measured], method: Method, wrong: Sequence[str | None]) -> Line:
    done = [one.outcome for one in ones if one.outcome.status == "done"]
    seconds = [statistics.median(step.seconds for step in _counted(outcome, method)) for outcome in done]
    tokens = setting.micro_batches * method.rows * method.tokens
    steps = [step for outcome in done for step in _counted(outcome, method)]
    peaks = [outcome.peak_memory_bytes or outcome.process_peak_bytes or 0 for outcome in done]
    problems = [f"{one.outcome.status}: {one.outcome.why}" for one in ones if one.outcome.status != "done"]
    problem = next((why for why in wrong if why), None) or (problems[0] if problems else None)
    return Line(
        setting=setting,
        system=system,
        runs=len(done),
        step_seconds=Spread.of(seconds) if seconds else None,
        tokens_per_second=Spread.of([tokens / second for second in seconds]) if seconds else None,
        peak_memory_bytes=max(peaks) if peaks else None,
        read_bytes=statistics.median(step.read_bytes for step in steps) if steps else None,
        written_bytes=statistics.median(step.written_bytes for step in steps) if steps else None,
        problem=problem,
        wrong=any(wrong),
    )


def _counted(outcome: Outcome, method: Method) -> Sequence[StepNumbers]:
    return outcome.steps[method.uncounted :] or outcome.steps


HEADINGS = ("setting", "system", "s/step", "tokens/s", "peak memory", "read GB/step", "written GB/step", "runs", "")


def cells_in_words(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Rows of text under :data:`HEADINGS`; a setting is named at its first line."""
    rows: list[tuple[str, ...]] = []
    before = None
    for line in lines:
        known = line.step_seconds is not None
        rows.append(
            (
                describe_setting(line.setting) if line.setting != before else "",
                line.system,
                _spread(line.step_seconds),
                _spread(line.tokens_per_second),
                format_bytes(line.peak_memory_bytes) if known and line.peak_memory_bytes else "",
                f"{(line.read_bytes or 0) / 1e9:.3g}" if known else "",
                f"{(line.written_bytes or 0) / 1e9:.3g}" if known else "",
                str(line.runs) if known else "",
                ("WRONG: " if line.wrong else "") + (line.problem or ""),
            )
        )
        before = line.setting
    return rows


def markdown(lines: Sequence[Line]) -> str:
    """The table for a page of documentation."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *cells_in_words(lines)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows
    )


def _spread(spread: Spread | None) -> str:
    """'12.3 (12.1-12.9)', or the median alone where all are alike."""
    if spread is None:
        return ""
    middle, least, most = (_short(value) for value in (spread.median, spread.least, spread.most))
    return middle if least == most else f"{middle} ({least}-{most})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
