"""The file of results: written after each cell, and read again to go on where it ends."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from greedysnake.bench.cells import Cell, Data, Measured, Method, Status
from greedysnake.bench.check import LOSS_TOLERANCE, NORM_TOLERANCE, wrong_cells
from greedysnake.errors import ConfigError
from greedysnake.report.metrics import write_json_atomic

FORMAT = 1
_TRY_AGAIN: tuple[Status, ...] = ("failed", "skipped", "out of time")
"""Outcomes that another day may change, so that a cell with one is measured again."""


class Results(Data):
    """All that a file holds.

    Attributes:
        format: of the file.
        method: what all cells have in common.
        machine: where they were measured.
        measured: cells with their outcomes, in the order of measuring.
    """

    format: int = FORMAT
    method: Method
    machine: dict[str, Any]
    measured: tuple[Measured, ...] = ()

    def outcome_of(self, cell: Cell) -> Measured | None:
        """What came of a cell, if it was measured."""
        return next((one for one in self.measured if one.cell == cell), None)

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those of some cells that are to be measured, in order."""
        known = {one.cell for one in self.measured if one.outcome.status not in _TRY_AGAIN}
        return [cell for cell in cells if cell not in known]

    def with_measured(self, one: Measured) -> "Results":
        """These results and one more; it replaces an earlier one of the same cell."""
        others = tuple(other for other in self.measured if other.cell != one.cell)
        return self.model_copy(update={"measured": (*others, one)})


def open_results(path: Path, method: Method) -> Results:
    """The results in a file that an earlier call wrote, or new ones.

    Raises:
        ConfigError: the file is no file of results, or was measured in another way.
    """
    if not path.exists():
        return Results(method=method, machine=describe_machine())
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        derived = ("wrong", "tolerance")
        known = {name: value for name, value in dict(data).items() if name not in derived}
        found = Results.model_validate(known)
    except (OSError, ValueError, TypeError) as error:  # pydantic's is a ValueError
        raise ConfigError(f"--out {path}: not a file of results, so it cannot be gone on with: {error}") from error
    before, now = found.method.model_dump(), method.model_dump()
    other = [f"{name} {before[name]}, now {now[name]}" for name in now if before[name] != now[name]]
    processor, here = found.machine.get("cpu"), describe_machine()["cpu"]
    other += [f"on {processor}, now {here}"] if processor not in (None, here) else []
    if other:
        raise ConfigError(
            f"--out {path} was measured otherwise: {'; '.join(other)}. Measure as before, or give another --out"
        )
    return found


def save_results(path: Path, results: Results) -> None:
    """Write the file whole, with what is wrong in it.

    Raises:
        ConfigError: it cannot be written.
    """
    wrong = [{"cell": cell.model_dump(), "why": why} for cell, why in wrong_cells(results.measured).items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tolerance = {"loss": LOSS_TOLERANCE, "grad_norm": NORM_TOLERANCE}
        write_json_atomic(path, {**results.model_dump(mode="json"), "tolerance": tolerance, "wrong": wrong})
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from error


def describe_machine() -> dict[str, Any]:
    """The machine, in the words of its kernel."""
    lines = {name: Path(f"/proc/{name}").read_text().splitlines() for name in ("cpuinfo", "meminfo")}
    models = {line.split(":", 1)[1].strip() for line in lines["cpuinfo"] if line.startswith("model name")}
    memory = next(int(line.split()[1]) * 1024 for line in lines["meminfo"] if line.startswith("MemTotal:"))
    return {"cpu": ", ".join(sorted(models)), "memory_bytes": memory, "kernel": platform.release()}
