"""Line charts over steps as inline SVG: thousands of steps are drawn as a band of their range and their mean."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greedysnake.report.wording import percent, safe

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 30
_MOST_POINTS = 500  # more are gathered
_BUCKETS = 250
_MOST_HOVERS = 200


@dataclass(frozen=True, kw_only=True)
class Series:
    """One thing over steps.

    Attributes:
        name: what the legend and the tooltip call it.
        color: name of a CSS variable, without dashes.
        points: (step, value), by rising step; all finite.
        look: ``line``; ``faint`` for what another series smooths; ``points`` for a few values, joined.
    """

    name: str
    color: str
    points: Sequence[tuple[int, float]]
    look: str = "line"


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where values are in a drawing: ``x`` of a step or time, ``y`` of a value."""

    left: float
    right: float
    top: float
    bottom: float
    first: float
    last: float
    low: float
    high: float
    log: bool = False

    def x(self, step: float) -> float:
        """Where a step or time is."""
        return self.left + (self.right - self.left) * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        """Where a value is."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)


def line_chart(
    series: Sequence[Series],
    write: Callable[[float], str],
    *,
    label: str,
    width: int = 560,
    height: int = 220,
    from_zero: bool = False,
    log: bool = False,
    limit: tuple[float, str] | None = None,
    marks: Sequence[tuple[int, str]] = (),
    tick_unit: float = 1.0,
    write_tick: Callable[[float], str] | None = None,
) -> str:
    """An SVG of ``series``, with a legend where there are several.

    Args:
        series: what to draw; those without points are left out.
        write: how a value is written.
        label: what the chart shows, for those who do not see it.
        width, height: of the drawing, in its own units.
        from_zero: whether the axis starts at 0.
        log: whether the axis is logarithmic, if all values are above 0 and differ widely.
        limit: a value to draw as a line across, and what is written at it.
        marks: (step, why) to mark at the lower edge.
        tick_unit: what round ticks are multiples of: ``2**30`` for an axis in GiB.
        write_tick: how the axis writes a value, if not like the tooltip.
    """
    series = [one for one in series if one.points]
    values = [value for one in series for _, value in one.points]
    if not values:
        return '<p class="none">not measured</p>'
    log = log and min(values) > 0 and max(values) > 10 * min(values)
    low, high, cut = _range(values, from_zero, log, limit[0] if limit else None)
    steps = [step for one in series for step, _ in one.points] + [step for step, _ in marks]
    first, last = min(steps), max(steps)
    lone = 0.5 * (first == last)
    axes = Axes(
        left=_LEFT,
        right=width - _RIGHT,
        top=_TOP,
        bottom=height - _BOTTOM,
        first=first - lone,
        last=last + lone,
        low=low,
        high=high,
        log=log,
    )
    parts = [value_axis(axes, write_tick or write, tick_unit), _step_axis(axes, first, last)]
    if limit is not None:
        y = axes.y(limit[0])
        parts.append(f'<line class="limit" x1="{axes.left}" x2="{axes.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="limit-label" x="{axes.right}" y="{y - 5:.1f}" text-anchor="end">{safe(limit[1])}</text>'
        )
    parts += [_drawn(one, axes) for one in series]
    for step, why in marks:
        x, y = axes.x(step), axes.bottom
        parts.append(
            f'<path class="mark" d="M{x:.1f} {y - 1:.1f}l-4 -8h8z"><title>step {step}: {safe(why)}</title></path>'
        )
    if cut:
        parts.append(
            f'<text class="note" x="{axes.right}" y="{axes.top - 4}" text-anchor="end">'
            f"higher values are cut off; the highest is {safe(write(max(values)))}</text>"
        )
    hovers, cursor = _hovers(series, axes, write), (axes.top, axes.bottom)
    return _legend(series, marks) + svg(parts, hovers, label=label, width=width, height=height, cursor=cursor)


def share_rows(rows: Sequence[tuple[Series, float]], *, label: str, width: int = 1140, row_height: int = 46) -> str:
    """An SVG with a small chart from 0 to 1 for each series, one below the other.

    Args:
        rows: the shares to draw, and the share that is written at the right of each; all over the same steps.
        label: what the chart shows, for those who do not see it.
        width: of the drawing, in its own units.
        row_height: of each row, in the drawing's units.
    """
    rows = [(row, share) for row, share in rows if row.points]
    if not rows:
        return '<p class="none">not measured</p>'
    steps = [step for row, _ in rows for step, _ in row.points]
    first, last = min(steps), max(steps)
    lone = 0.5 * (first == last)
    height = len(rows) * row_height + 16
    parts = []
    for index, (row, share) in enumerate(rows):
        axes = Axes(
            left=110,
            right=width - 46,
            top=6 + index * row_height,
            bottom=6 + index * row_height + row_height - 12,
            first=first - lone,
            last=last + lone,
            low=0.0,
            high=1.0,
        )
        middle = (axes.top + axes.bottom) / 2
        parts.append(
            f'<rect class="well" x="{axes.left}" y="{axes.top}" width="{axes.right - axes.left}"'
            f' height="{axes.bottom - axes.top}"/>'
            f'<text class="row-name" x="{axes.left - 10}" y="{middle + 4}" text-anchor="end">{safe(row.name)}</text>'
            f'<text class="row-value" x="{axes.right + 8}" y="{middle + 4}">'
            f"{percent(share)}</text>"
        )
        parts.append(_area(row, axes))
    parts.append(_step_axis(axes, first, last))
    hovers, cursor = _hovers([row for row, _ in rows], axes, percent), (6, axes.bottom)
    return svg(parts, hovers, label=label, width=width, height=height, cursor=cursor)


def _range(values: Sequence[float], from_zero: bool, log: bool, limit: float | None) -> tuple[float, float, bool]:
    """Lowest and highest value of an axis, and whether the highest values are cut off."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual_low, usual_high = ordered[len(ordered) // 50], ordered[-1 - len(ordered) // 50]
    # A few wild values must not press all others flat.
    cut = not log and len(ordered) > 50 and high > usual_high + 3 * (usual_high - usual_low) > usual_high
    if cut:
        high = usual_high + (usual_high - usual_low)
    if limit is not None:
        high = max(high, limit)
    if log:
        return low / 1.2, high * 1.2, False
    if from_zero:
        low = min(0.0, low)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if from_zero else low - room), high + room, cut


def round_ticks(low: float, high: float, wanted: float, unit: float = 1.0) -> list[float]:
    """About ``wanted`` values from ``low`` to ``high``: multiples of 1, 2 or 5 times a power of ten of ``unit``."""
    rough = (high - low) / wanted / unit
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999) * power * unit
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def value_axis(axes: Axes, write: Callable[[float], str], unit: float) -> str:
    """Lines across at round values, multiples of ``unit``, and their values at the left."""
    if axes.log:
        ticks = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(axes.low)), math.ceil(math.log10(axes.high)) + 1)
            for factor in ((1,) if axes.high / axes.low > 1000 else (1, 2, 5))
        ]
        ticks = [tick for tick in ticks if axes.low <= tick <= axes.high]
        ticks = ticks[:: -(-len(ticks) // 7)] if ticks else []
    else:
        ticks = round_ticks(axes.low, axes.high, (axes.bottom - axes.top) / 30, unit)
    return "".join(
        f'<line class="grid" x1="{axes.left}" x2="{axes.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{axes.left - 7}" y="{y + 3.5:.1f}" text-anchor="end">{safe(write(tick))}</text>'
        for tick in ticks
        for y in (axes.y(tick),)
    )


def _step_axis(axes: Axes, first: int, last: int) -> str:
    ticks = sorted({round(tick) for tick in round_ticks(first, last, 8)} | {first}) if last > first else [first]
    apart = 0.06 * (last - first)
    ticks = [tick for tick in ticks if first <= tick <= last and (tick == first or tick - first >= apart)]
    y = axes.bottom
    return f'<line class="axis" x1="{axes.left}" x2="{axes.right}" y1="{y}" y2="{y}"/>' + "".join(
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>'
        f'<text class="tick" x="{x:.1f}" y="{y + 17}" text-anchor="middle">{"step " * (tick == first)}{tick:,}</text>'
        for tick in ticks
        for x in (axes.x(tick),)
    )


def _buckets(points: Sequence[tuple[int, float]]) -> list[tuple[float, float, float, float]]:
    """(middle step, lowest, mean, highest) of neighbouring points."""
    found = []
    for index in range(_BUCKETS):
        part = points[index * len(points) // _BUCKETS : (index + 1) * len(points) // _BUCKETS]
        values = [value for _, value in part]
        found.append(((part[0][0] + part[-1][0]) / 2, min(values), sum(values) / len(values), max(values)))
    return found


def _path(points: Sequence[Point], axes: Axes) -> str:
    # What is beyond the axis runs along the frame.
    return "L".join(
        f"{axes.x(step):.1f} {min(max(axes.y(value), axes.top), axes.bottom):.1f}" for step, value in points
    )


def _drawn(series: Series, axes: Axes) -> str:
    style = f'style="--c:var(--{series.color})"'
    if series.look == "points":
        dots = "".join(
            f'<circle cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="3.6"/>'
            for step, value in series.points
            if len(series.points) <= 100 and axes.low <= value <= axes.high
        )
        return f'<g class="dotted" {style}><path d="M{_path(series.points, axes)}"/>{dots}</g>'
    if len(series.points) == 1:
        (step, value) = series.points[0]
        return f'<g class="dotted" {style}><circle cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}" r="3.6"/></g>'
    if len(series.points) <= _MOST_POINTS:
        return f'<path class="{series.look}" {style} d="M{_path(series.points, axes)}"/>'
    buckets = _buckets(series.points)
    outline = [(step, high) for step, _, _, high in buckets] + [(step, low) for step, low, _, _ in reversed(buckets)]
    band = f'<path class="band" {style} d="M{_path(outline, axes)}z"/>'
    if series.look == "faint":
        return band
    return band + f'<path class="line" {style} d="M{_path([(step, mean) for step, _, mean, _ in buckets], axes)}"/>'


def _area(series: Series, axes: Axes) -> str:
    points: Sequence[Point] = series.points
    if len(points) > _MOST_POINTS:
        points = [(step, mean) for step, _, mean, _ in _buckets(series.points)]
    if len(points) == 1:  # one step fills the row
        points = [(axes.first, points[0][1]), (axes.last, points[0][1])]
    base = f"L{axes.x(points[-1][0]):.1f} {axes.bottom}L{axes.x(points[0][0]):.1f} {axes.bottom}z"
    path, style = _path(points, axes), f'style="--c:var(--{series.color})"'
    return f'<path class="area" {style} d="M{path}{base}"/><path class="line" {style} d="M{path}"/>'


def _hovers(series: Sequence[Series], axes: Axes, write: Callable[[float], str]) -> list[tuple[float, str]]:
    """(place, text) of what a tooltip tells, for some of the steps."""
    tables = [dict(one.points) for one in series]
    steps = sorted({step for one in series for step, _ in one.points})
    every = -(-len(steps) // _MOST_HOVERS)
    rare = {step for one in series if one.look == "points" for step, _ in one.points[-_MOST_HOVERS:]}
    chosen = sorted({*steps[::every], steps[-1], *rare})
    return [
        (
            round(axes.x(step), 1),
            f"step {step:,}\n"
            + "\n".join(
                f"{one.name}: {write(table[step])}" for one, table in zip(series, tables, strict=True) if step in table
            ),
        )
        for step in chosen
    ]


def _legend(series: Sequence[Series], marks: Sequence[tuple[int, str]]) -> str:
    if len(series) < 2 and not marks:
        return ""
    entries = "".join(
        f'<span><i class="{one.look}" style="--c:var(--{one.color})"></i>{safe(one.name)}</span>' for one in series
    )
    return f'<p class="legend">{entries}{"<span><b>▼</b>skipped step</span>" if marks else ""}</p>'


def svg(
    parts: Sequence[str],
    hovers: Sequence[tuple[float, str]],
    *,
    label: str,
    width: int,
    height: int,
    cursor: tuple[float, float],
) -> str:
    """A drawing of ``parts``.

    Args:
        parts: SVG elements.
        hovers: place and text of each thing that the tooltip tells.
        label: what it shows, for those who do not see it.
        width, height: of the drawing, in its own units.
        cursor: top and bottom of the line that follows the pointer.
    """
    data = safe(json.dumps(hovers, ensure_ascii=False, separators=(",", ":")))
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{safe(label)}" data-hover="{data}">'
        f"{''.join(parts)}"
        f'<line class="cursor" x1="0" x2="0" y1="{cursor[0]}" y2="{cursor[1]}"/></svg>'
    )
