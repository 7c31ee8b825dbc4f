"""A run's operations and memory as a trace for ui.perfetto.dev or chrome://tracing, and how busy each resource was."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from greedysnake.report.events import RESOURCES, OperationEvent, assign_lanes, operation_name, union_seconds, unit_name
from greedysnake.report.memory import TierMemory, counter_samples
from greedysnake.report.metrics import write_json_atomic

_PROCESS_ID = 1
_ROWS = ("steps", *RESOURCES)
_THREADS_PER_ROW = 1000  # a row's operations that overlap take further threads: its own number + 1, + 2, ...


def write_trace(
    path: str | os.PathLike[str],
    steps: Mapping[int, Sequence[OperationEvent]],
    unit_names: Sequence[str],
    memory: Mapping[int, Sequence[TierMemory]] | None = None,
) -> None:
    """Write a Chrome trace JSON file: a row of steps, a row per resource, and counters of each tier's memory.

    Times are microseconds from the first event. Operations that overlap in one resource take further rows.

    Args:
        path: the file to write or replace.
        steps: the events of every step to show, by step number.
        unit_names: the name of unit 0, unit 1, ...: 'embedding', 'layer 0', ...
        memory: what each tier held in those of ``steps`` for which that is known, on the events' clock.

    Raises:
        OSError: the file cannot be written.
    """
    origin_s = min((event.start_s for events in steps.values() for event in events), default=0.0)
    rows: dict[str, list[dict[str, Any]]] = {row: [] for row in _ROWS}
    for step, events in sorted(steps.items()):
        if not events:
            continue
        first_s = min(event.start_s for event in events) - origin_s
        last_s = max(event.end_s for event in events) - origin_s
        rows["steps"].append(_slice(f"step {step}", "step", first_s, last_s, {"step": step}))
        for event in events:
            rows[event.resource].append(
                _slice(
                    operation_name(event, unit_names),
                    event.kind,
                    event.start_s - origin_s,
                    event.end_s - origin_s,
                    {"step": step, **_event_args(event, unit_names)},
                )
            )

    trace_events = [_metadata("process_name", 0, {"name": "greedysnake"})]
    for index, (row, slices) in enumerate(rows.items()):
        # Slices of one thread must not overlap partly: viewers would drop or stretch them.
        lanes = assign_lanes([(entry["ts"], entry["ts"] + entry["dur"]) for entry in slices])
        for lane in range(max(lanes, default=0) + 1):
            thread = index * _THREADS_PER_ROW + lane
            trace_events.append(_metadata("thread_name", thread, {"name": row if lane == 0 else f"{row} ({lane + 1})"}))
            trace_events.append(_metadata("thread_sort_index", thread, {"sort_index": thread}))
        for entry, lane in zip(slices, lanes, strict=True):
            entry["tid"] = index * _THREADS_PER_ROW + lane
            # Whole nanoseconds until here keep the end of one slice from passing the start of the next.
            entry["ts"] /= 1000
            entry["dur"] /= 1000
        trace_events += sorted(slices, key=lambda entry: entry["ts"])
    for _, tiers in sorted((memory or {}).items()):
        trace_events += [_counter(name, time - origin_s, values) for time, name, values in counter_samples(tiers)]
    write_json_atomic(path, {"traceEvents": trace_events, "displayTimeUnit": "ms"}, indent=None)


def busy_shares(events: Iterable[OperationEvent], seconds: float) -> dict[str, float]:
    """The share (0 to 1) of ``seconds`` of wall time in which each resource had an operation running.

    Every resource is in the answer. Operations that overlap count once.

    Raises:
        ValueError: ``seconds`` is not above zero.
    """
    if not seconds > 0:
        raise ValueError(f"busy shares need a wall time above 0 s, not {seconds}")
    intervals: dict[str, list[tuple[float, float]]] = {resource: [] for resource in RESOURCES}
    for event in events:
        intervals[event.resource].append((event.start_s, event.end_s))
    return {resource: min(1.0, union_seconds(spans) / seconds) for resource, spans in intervals.items()}


def _slice(name: str, category: str, start_s: float, end_s: float, args: Mapping[str, Any]) -> dict[str, Any]:
    """A complete ("X") event whose times are still whole nanoseconds and whose thread is not yet known."""
    start_ns = round(start_s * 1e9)
    duration_ns = max(0, round(end_s * 1e9) - start_ns)
    return {
        "ph": "X",
        "pid": _PROCESS_ID,
        "tid": 0,
        "name": name,
        "cat": category,
        "ts": start_ns,
        "dur": duration_ns,
        "args": args,
    }


def _counter(name: str, time_s: float, values: Mapping[str, int]) -> dict[str, Any]:
    """A counter ("C") event: its values hold until the next one; chrome://tracing stacks them."""
    return {
        "ph": "C",
        "pid": _PROCESS_ID,
        "tid": 0,
        "name": name,
        "cat": "memory",
        "ts": round(time_s * 1e9) / 1000,
        "args": values,
    }


def _event_args(event: OperationEvent, unit_names: Sequence[str]) -> dict[str, Any]:
    """What a viewer shows when one clicks on the event; what does not apply is left out."""
    seconds = event.end_s - event.start_s
    timed = event.bytes > 0 and seconds > 0
    args = {
        "unit": None if event.unit is None else unit_name(event.unit, unit_names),
        "micro_batch": event.micro_batch,
        "chunk": event.chunk,
        "bytes": event.bytes,
        "rate_MB_per_s": round(event.bytes / 1e6 / seconds, 3) if timed else None,
        "parameters": event.parameters or None,
    }
    return {key: value for key, value in args.items() if value is not None}


def _metadata(name: str, thread: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS_ID, "tid": thread, "name": name, "args": args}
