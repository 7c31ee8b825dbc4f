"""Stacked areas over the time of a step as inline SVG; values hold from each time to the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from greedysnake.report.charts import Axes, round_ticks, svg, value_axis
from greedysnake.report.wording import safe, seconds, time_scale

_WIDTH, _HEIGHT = 1140, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 26
_COLUMNS = 480  # a little over two pixels each, so that the shortest peak is seen


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One area of a stack.

    Attributes:
        name: what the legend and the tooltip call it.
        color: name of a CSS variable, without dashes.
        values: from each time to the next; finite, not negative.
    """

    name: str
    color: str
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Level:
    """A line across: what the stack may or could reach.

    Attributes:
        value: where.
        name: what the legend calls it.
        look: ``reserved`` or ``limit``.
    """

    value: float
    name: str
    look: str


def stacked_areas(
    layers: Sequence[Layer],
    times_s: Sequence[float],
    write: Callable[[float], str],
    *,
    label: str,
    levels: Sequence[Level] = (),
    tick_unit: float = 1.0,
) -> str:
    """An SVG of ``layers`` on top of each other, the first at the bottom, with a legend.

    The drawing has some hundred columns; each shows the moment with the highest sum in it, so that no peak is lost.

    Args:
        layers: what to draw; those that are zero throughout are left out.
        times_s: rising seconds from the start of the step; the last is its end.
        write: how a value is written.
        label: what the chart shows, for those who do not see it.
        levels: lines across.
        tick_unit: what round ticks are multiples of: ``2**20`` for an axis in MiB.
    """
    layers = [layer for layer in layers if max(layer.values, default=0) > 0]
    if not layers or not times_s[-1] > 0:
        return '<p class="none">nothing was held</p>'
    times, layers = _columns(times_s, layers)
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    axes = Axes(
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_HEIGHT - _BOTTOM,
        first=0.0,
        last=times_s[-1],
        low=0.0,
        high=1.06 * max([*totals, *(level.value for level in levels)]),
    )
    parts = [value_axis(axes, write, tick_unit)]
    lower = [0.0] * len(times)
    for layer in layers:
        upper = [below + value for below, value in zip(lower, layer.values, strict=True)]
        path = _stairs(times, upper, axes) + "L" + _stairs(times, lower, axes, backward=True)[1:] + "z"
        parts.append(f'<path class="stacked" style="--c:var(--{layer.color})" d="{path}"/>')
        lower = upper
    for level in levels:
        y = axes.y(level.value)
        parts.append(f'<line class="{level.look}" x1="{axes.left}" x2="{axes.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts.append(_time_axis(axes))
    hovers = _hovers(times, layers, totals, axes, write)
    cursor = (axes.top, axes.bottom)
    return _legend(layers, levels) + svg(parts, hovers, label=label, width=_WIDTH, height=_HEIGHT, cursor=cursor)


def _columns(times: Sequence[float], layers: Sequence[Layer]) -> tuple[list[float], list[Layer]]:
    """Where each column begins, where the last one ends, and the values of its moment with the highest sum."""
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    begins = [times[-1] * column / _COLUMNS for column in range(_COLUMNS + 1)]
    chosen, first = [], 0
    for begin, end in pairwise(begins):
        while first + 1 < len(times) and times[first + 1] <= begin:
            first += 1  # the last change before the column: its values hold at the column's beginning
        after = first + 1
        while after < len(times) and times[after] < end:
            after += 1
        chosen.append(max(range(first, after), key=totals.__getitem__))
    chosen.append(len(times) - 1)
    return begins, [replace(layer, values=[layer.values[index] for index in chosen]) for layer in layers]


def _stairs(times: Sequence[float], values: Sequence[float], axes: Axes, *, backward: bool = False) -> str:
    """A path along ``values``, each held until the next time."""
    corners = [(times[0], values[0])]
    for time, before, value in zip(times[1:], values, values[1:], strict=False):
        if value != before:
            corners += [(time, before), (time, value)]
    corners.append((times[-1], values[-1]))
    if backward:
        corners.reverse()
    return "M" + "L".join(f"{axes.x(time):.1f} {axes.y(value):.1f}" for time, value in corners)


def _time_axis(axes: Axes) -> str:
    scale, suffix = time_scale(axes.last)
    y = axes.bottom
    return f'<line class="axis" x1="{axes.left}" x2="{axes.right}" y1="{y}" y2="{y}"/>' + "".join(
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>'
        f'<text class="tick" x="{x:.1f}" y="{y + 17}" text-anchor="middle">{tick:.6g}'
        f"{f' {suffix}' if tick == 0 else ''}</text>"
        for tick in round_ticks(0.0, axes.last * scale, 10)
        for x in (axes.x(tick / scale),)
    )


def _hovers(
    times: Sequence[float],
    layers: Sequence[Layer],
    totals: Sequence[float],
    axes: Axes,
    write: Callable[[float], str],
) -> list[tuple[float, str]]:
    """(place, text) of what a tooltip tells: of every two columns, the one with the higher sum."""
    hovers = []
    for column in range(0, len(times), 2):
        index = max(range(column, min(column + 2, len(times))), key=totals.__getitem__)
        told = [f"{layer.name}: {write(layer.values[index])}" for layer in reversed(layers) if layer.values[index]]
        words = "\n".join([seconds(times[index]), *told, f"together: {write(totals[index])}"])
        hovers.append((round(axes.x(times[index]), 1), words))
    return hovers


def _legend(layers: Sequence[Layer], levels: Sequence[Level]) -> str:
    entries = [
        *(f'<span><i class="box" style="--c:var(--{layer.color})"></i>{safe(layer.name)}</span>' for layer in layers),
        *(f'<span><i class="{level.look}"></i>{safe(level.name)}</span>' for level in levels),
    ]
    return f'<p class="legend">{"".join(entries)}</p>'
