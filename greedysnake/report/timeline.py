"""The timeline of one step as HTML: a row for each resource that was used, a bar for each operation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from greedysnake.report.bars import FAMILY_COLORS, Bar, bars_of
from greedysnake.report.charts import round_ticks
from greedysnake.report.events import RESOURCES, OperationEvent, operation_name, resource_words, unit_name
from greedysnake.report.facts import covered_seconds, step_seconds
from greedysnake.report.run_files import TracedStep
from greedysnake.report.wording import moved, percent, rate, safe, seconds, time_scale

WIDTH = 1000.0
"""A step's length in the drawing's units; the page stretches it to what there is."""
ROW_HEIGHT = 38
"""Pixels."""
_MOST_BARS = 3000  # more would make the page slow; the narrowest are then drawn together
_GAP = 0.5  # between bars that are wide enough


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Neighbouring operations that are drawn as one bar; mostly a single one."""

    bar: Bar
    events: list[OperationEvent]


def timeline(traced: TracedStep) -> str:
    """The timeline of a step, zoomed by the page's script; without it, it is as wide as the page."""
    whole = step_seconds(traced)
    if not whole > 0:
        return '<p class="none">the traced step took no time</p>'
    used = [resource for resource in RESOURCES if any(event.resource == resource for event in traced.events)]
    rows = {resource: [event for event in traced.events if event.resource == resource] for resource in used}
    height = len(used) * ROW_HEIGHT
    names = "".join(
        f'<div style="height:{ROW_HEIGHT}px"><b>{safe(resource_words(resource))}</b>'
        f"<span>{safe(percent(covered_seconds(events) / whole))} busy</span></div>"
        for resource, events in rows.items()
    )
    bars, labels = [], []
    for index, groups in enumerate(_groups(rows, whole).values()):
        y = index * ROW_HEIGHT
        bars.append(f'<rect class="well" x="0" y="{y + 3}" width="{WIDTH:.0f}" height="{ROW_HEIGHT - 6}"/>')
        bars += [_rectangle(group, traced.unit_names, y) for group in groups]
        labels += _labels(groups, traced.unit_names, y)
    return (
        f'<div class="timeline"><div class="timeline-names">{names}</div><div class="timeline-scroll">'
        f'<div class="timeline-canvas"><svg viewBox="0 0 {WIDTH:.0f} {height}" preserveAspectRatio="none"'
        f' style="height:{height}px" role="img" aria-label="timeline of step {traced.number}">{"".join(bars)}</svg>'
        f"{''.join(labels)}{_time_axis(whole, height)}</div></div></div>"
    )


def legend(traced: TracedStep) -> str:
    """The colours of the families of operations that occur."""
    present = {bar.family for bar in bars_of(traced.events, 0, 0.0, 1.0)}
    return "".join(
        f'<span><i class="box" style="--c:var(--{family})"></i>{family}</span>'
        for family in FAMILY_COLORS
        if family in present
    )


def _groups(rows: dict[str, list[OperationEvent]], whole: float) -> dict[str, list[_Group]]:
    """What to draw of each resource; the narrowest operations are drawn together as far as is needed."""
    found: dict[str, list[_Group]] = {}
    for narrow, across_units in ((0.0, False), (0.5, False), (2.0, False), (0.5, True), (1.0, True), (4.0, True)):
        found = {resource: _grouped(events, whole, narrow, across_units) for resource, events in rows.items()}
        if sum(map(len, found.values())) <= _MOST_BARS:
            break
    return found


def _grouped(events: Sequence[OperationEvent], whole: float, narrow: float, across_units: bool) -> list[_Group]:
    """One group an operation, but one for neighbours of a family that are narrower than ``narrow``."""
    events = sorted(events, key=lambda event: event.start_s)
    groups: list[_Group] = []
    latest: dict[float, int] = {}  # by lane
    for event, bar in zip(events, bars_of(events, 0, 0.0, WIDTH / whole), strict=True):
        before = groups[latest[bar.top]] if bar.top in latest else None
        if (
            before is not None
            and before.bar.family == bar.family
            and (before.bar.unit == bar.unit or across_units)
            and bar.width < narrow
            and bar.left - (before.bar.left + before.bar.width) < narrow
            and (len(before.events) > 1 or before.bar.width < narrow)
        ):
            width = bar.left + bar.width - before.bar.left
            unit = bar.unit if before.bar.unit == bar.unit else None
            before.events.append(event)
            groups[latest[bar.top]] = _Group(bar=replace(before.bar, width=width, unit=unit), events=before.events)
        else:
            latest[bar.top] = len(groups)
            groups.append(_Group(bar=bar, events=[event]))
    return groups


def _rectangle(group: _Group, unit_names: Sequence[str], y: float) -> str:
    bar = group.bar
    shade = " odd" if bar.unit is not None and bar.unit % 2 else ""
    width = bar.width - _GAP if bar.width > 4 * _GAP else bar.width
    top, height = _pixels(bar, y)
    return (
        f'<rect class="bar{shade}" style="--c:var(--{bar.family})" x="{bar.left:.2f}" y="{top:.1f}"'
        f' width="{max(width, 0.3):.2f}" height="{height:.1f}">'
        f"<title>{safe(_told(group.events, unit_names))}</title></rect>"
    )


def _pixels(bar: Bar, y: float) -> tuple[float, float]:
    """Top and height of a bar of row 0, drawn in the row that starts at ``y``."""
    return y + (bar.top + 0.5) * ROW_HEIGHT, bar.height * ROW_HEIGHT * 0.96


def _told(events: Sequence[OperationEvent], unit_names: Sequence[str]) -> str:
    first, last = events[0], events[-1]
    name = operation_name(first, unit_names)
    if len(events) > 1:
        name = f"{len(events)} operations, from {name} to {operation_name(last, unit_names)}"
    busy = sum(event.end_s - event.start_s for event in events)
    lines = [name, f"{seconds(busy)}, from {first.start_s:.4f} s to {max(event.end_s for event in events):.4f} s"]
    count = sum(event.bytes for event in events)
    if count:
        lines.append(moved(count) + (f" at {rate(count / busy)}" if busy > 0 else ""))
    return "\n".join(lines)


def _labels(groups: Sequence[_Group], unit_names: Sequence[str], y: float) -> list[str]:
    """A unit's short name across neighbouring bars of one unit and family; the page hides it where it does not fit."""
    runs: list[list[_Group]] = []
    for group in groups:
        before = runs[-1][-1].bar if runs else None
        bar = group.bar
        if (
            before is not None
            and (before.top, before.family, before.unit) == (bar.top, bar.family, bar.unit)
            and bar.left - (before.left + before.width) < 0.15 * bar.width + _GAP
        ):
            runs[-1].append(group)
        else:
            runs.append([group])
    labels = []
    for run in runs:
        bar, right = run[0].bar, run[-1].bar.left + run[-1].bar.width
        if bar.unit is None or right - bar.left < 2:
            continue
        top, height = _pixels(bar, y)
        if height < 12:
            continue
        name = unit_name(bar.unit, unit_names)
        left, width = bar.left * 100 / WIDTH, (right - bar.left) * 100 / WIDTH
        labels.append(
            f'<span class="unit" style="left:{left:.2f}%;width:{width:.2f}%;'
            f'top:{top:.0f}px;line-height:{height:.0f}px"><span>{safe(_short(name))}</span></span>'
        )
    return labels


def _short(name: str) -> str:
    """3 of 'layer 3', E of 'embedding'."""
    number = name.rpartition(" ")[2]
    return number if number[:1].isdigit() else name[:1].upper()


def _time_axis(whole: float, height: float) -> str:
    scale, suffix = time_scale(whole)
    length = whole * scale
    coarse = round_ticks(0.0, 0.97 * length, 10)
    marks = ""
    for tick in round_ticks(0.0, 0.97 * length, 40):
        look = "coarse" if any(abs(tick - other) < 1e-6 * length for other in coarse) else "fine"
        marks += (
            f'<span class="{look}" style="left:{tick * 100 / length:.2f}%">'
            f"{tick:.4g}{f' {suffix}' if tick == 0 else ''}</span>"
        )
    return f'<div class="timeline-axis" style="top:{height}px">{marks}</div>'
