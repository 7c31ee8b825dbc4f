"""A run folder as it is found: whole, cut short by a kill, or with files missing, and what is missing in words."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from greedysnake.config.yaml_text import parse_yaml
from greedysnake.errors import ConfigError
from greedysnake.report.events import RESOURCES, OperationEvent
from greedysnake.report.memory import TierMemory, memory_of_samples

CONFIG, PLAN, METRICS, SUMMARY, TRACE = "config.yaml", "plan.json", "metrics.jsonl", "summary.json", "trace.json"
HARDWARE = "hardware.json"
_MOST = 1e150  # what is larger was not measured, and would make sums and squares overflow
_RECORDS = (METRICS, PLAN, SUMMARY, TRACE)
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """The last step of a trace; times are seconds from its first event."""

    number: int
    events: list[OperationEvent]
    unit_names: list[str]
    memory: list[TierMemory] = field(default_factory=list)
    """What each tier held; empty if the trace does not tell."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run folder holds. A file that is missing or damaged is empty here and named in ``missing``."""

    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ``metrics.jsonl`` by rising step; of a step that was repeated after a resume, the later line."""
    summary: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    """What a probe measured of the machine; empty, and not named in ``missing``, if none was made."""
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    traced: TracedStep | None = None
    missing: list[str] = field(default_factory=list)
    """A sentence for everything that could not be read."""


def read_run(folder: Path) -> RunFiles:
    """Read whatever a run folder holds.

    Raises:
        ConfigError: ``folder`` is no folder, or nothing in it was recorded by a run.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder. Give the one that 'run' named")
    recorded = any((folder / name).is_file() for name in _RECORDS)
    if not recorded and (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} has nothing to report: its run was still reading data or loading its model when it ended, or is "
            f"doing so now. If it has ended, greedysnake resume {folder} goes on with that"
        )
    if not recorded:
        raise ConfigError(
            f"{folder} is not a run folder: it has none of {', '.join(_RECORDS)}. "
            f"Give the folder that 'run' named in training"
        )
    missing: list[str] = []
    config_text = _read_text(folder / CONFIG, missing, "the run's settings are not known")
    steps = _read_steps(folder / METRICS, missing)
    if not (folder / SUMMARY).is_file():
        missing.append(f"{SUMMARY} is not there: the run is still going, or it was killed")
    return RunFiles(
        folder=folder,
        steps=steps,
        summary=_read_object(folder / SUMMARY, missing, None),
        plan=_read_object(folder / PLAN, missing, "why the plan is as it is, and the memory budget, are not known"),
        hardware=_read_object(folder / HARDWARE, missing, None),
        config=_parse_config(config_text, missing),
        config_text=config_text,
        traced=_read_trace(folder / TRACE, missing),
        missing=missing,
    )


def number(value: Any) -> float | None:
    """``value`` if it is a number that can have been measured, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _MOST else None  # false for NaN, too


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _read_text(path: Path, missing: list[str], consequence: str | None) -> str:
    """The text of a file, or "" with a sentence in ``missing`` (none if ``consequence`` is None)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if consequence is not None:
            why = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            missing.append(f"{path.name} {why}: {consequence}")
        return ""


def _read_object(path: Path, missing: list[str], consequence: str | None) -> dict[str, Any]:
    text = _read_text(path, missing, consequence)
    if not path.is_file():
        return {}
    value = _from_json(text)
    if not isinstance(value, dict):
        missing.append(f"{path.name} is damaged: it holds no JSON object")
        return {}
    return value


def _from_json(text: str | bytes) -> Any:
    """What ``text`` says as JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_steps(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    # Not read_metrics, which refuses a file with a damaged line: a report shows what is left.
    text = _read_text(path, missing, "nothing is known of single steps")
    lines = [line for line in text.split("\n") if line.strip()]
    steps: dict[int, dict[str, Any]] = {}
    damaged = []
    for index, line in enumerate(lines):
        record = _from_json(line)
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, int) and number(step) is not None:
            steps[step] = record
        else:
            damaged.append(index)
    if damaged == [len(lines) - 1]:
        missing.append(f"the last line of {path.name} is torn: the run was killed while it wrote it")
    elif damaged:
        missing.append(f"{len(damaged)} of {len(lines)} lines of {path.name} are damaged and left out")
    if not steps and path.is_file():
        missing.append(f"{path.name} holds no whole step")
    return [steps[step] for step in sorted(steps)]


def _parse_config(text: str, missing: list[str]) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value, _ = parse_yaml(text)
    except (ValueError, RecursionError) as error:
        missing.append(f"{CONFIG} is damaged: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def _read_trace(path: Path, missing: list[str]) -> TracedStep | None:
    text = _read_text(path, missing, "there is no timeline (a run writes it when it ends)")
    if not path.is_file():
        return None
    try:
        entries = list(json.loads(text)["traceEvents"])
        operations = _last_operations(entries)
        traced = _traced_step(operations) if operations else None
    except _DAMAGE:
        missing.append(f"{path.name} is damaged: there is no timeline")
        return None
    if traced is None:
        missing.append(f"{path.name} holds no operation")
        return None
    try:
        return replace(traced, memory=_memory_during(operations, entries))
    except _DAMAGE:
        missing.append(f"the memory counters of {path.name} are damaged: there is no picture of memory over a step")
        return traced


def _last_operations(entries: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    """The operations of a trace's last step by rising time, each with its resource."""
    rows = {entry["tid"]: entry["args"]["name"] for entry in entries if entry.get("name") == "thread_name"}
    operations = []
    for entry in entries:
        # Operations that overlap are in rows of their own: 'compute (2)'.
        resource = str(rows.get(entry.get("tid"), "")).partition(" (")[0]
        if entry.get("ph") == "X" and resource in RESOURCES:
            operations.append((entry, resource))
    last = max((int(entry["args"]["step"]) for entry, _ in operations), default=None)
    operations = [(entry, resource) for entry, resource in operations if entry["args"]["step"] == last]
    return sorted(operations, key=lambda operation: operation[0]["ts"])


def _traced_step(operations: Sequence[tuple[Mapping[str, Any], str]]) -> TracedStep:
    origin = operations[0][0]["ts"]
    units: dict[str, int] = {}
    events = []
    for entry, resource in operations:
        args, start = entry["args"], (entry["ts"] - origin) / 1e6
        unit = args.get("unit")
        if not math.isfinite(start + entry["dur"]):
            raise ValueError("a time that is not finite")
        events.append(
            OperationEvent(
                kind=str(entry["cat"]),
                resource=resource,
                unit=None if unit is None else units.setdefault(str(unit), len(units)),
                micro_batch=_whole(args.get("micro_batch")),
                chunk=_whole(args.get("chunk")),
                start_s=start,
                end_s=start + entry["dur"] / 1e6,
                bytes=_whole(args.get("bytes")) or 0,
                parameters=_whole(args.get("parameters")) or 0,
            )
        )
    return TracedStep(number=int(operations[0][0]["args"]["step"]), events=events, unit_names=list(units))


def _memory_during(
    operations: Sequence[tuple[Mapping[str, Any], str]], entries: Iterable[Mapping[str, Any]]
) -> list[TierMemory]:
    """What the counters of a trace say from the start of ``operations`` to their end."""
    origin, end = operations[0][0]["ts"], max(entry["ts"] + entry["dur"] for entry, _ in operations)
    nanosecond = 1e-3
    return memory_of_samples(
        [
            ((entry["ts"] - origin) / 1e6, str(entry["name"]), entry["args"])
            for entry in entries
            if entry.get("ph") == "C" and origin - nanosecond <= entry["ts"] <= end + nanosecond
        ]
    )


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
