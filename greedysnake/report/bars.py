"""The bars of a timeline: what colour an operation has, where it is drawn, and what is written in it."""

import colorsys
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import to_rgb

from greedysnake.report.events import OperationEvent, assign_lanes, unit_name

_Color = tuple[float, float, float]

FAMILY_COLORS = {
    "forward": "#2f6db5",
    "backward": "#d96f2b",
    "head": "#7d4fa8",
    "optimizer": "#2f8a52",
    "reads": "#3a9fb3",
    "writes": "#c44d73",
    "copies": "#b1862b",
    "other": "#9aa2ac",
}
"""Colours of the families of kinds, in the order of a legend."""
_KIND_FAMILIES = {
    "forward": "forward",
    "backward": "backward",
    "head": "head",
    "update": "optimizer",
    "gradient_norm": "optimizer",
    "total_norm": "optimizer",
}
_PREFIX_FAMILIES = {"load_": "reads", "store_": "writes", "hold_": "writes", "copy_": "copies"}

ROW_FILL = 0.74
"""Of a row's height, the part that its bars take."""
_LABEL_CHARACTER_PX = 13  # width of a digit of a bar's label


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One operation as a rectangle, in the units of the axes."""

    left: float
    width: float
    top: float
    height: float
    family: str
    unit: int | None


def _family(kind: str) -> str:
    if kind in _KIND_FAMILIES:
        return _KIND_FAMILIES[kind]
    return next((family for prefix, family in _PREFIX_FAMILIES.items() if kind.startswith(prefix)), "other")


def bars_of(events: Sequence[OperationEvent], row: int, origin: float, scale: float) -> list[Bar]:
    """The bars of one resource from left to right; operations that overlap share the row's height."""
    events = sorted(events, key=lambda event: event.start_s)
    lanes = assign_lanes([(event.start_s, event.end_s) for event in events])
    height = ROW_FILL / (max(lanes) + 1)
    return [
        Bar(
            left=(event.start_s - origin) * scale,
            width=(event.end_s - event.start_s) * scale,
            top=row - ROW_FILL / 2 + lane * height,
            height=height,
            family=_family(event.kind),
            unit=event.unit,
        )
        for event, lane in zip(events, lanes, strict=True)
    ]


def draw_bars(axes: Any, bars: Sequence[Bar], px_per_time: float) -> None:
    """Draw ``bars``: a white gap after each run of one unit, a faint one after each bar inside of a run."""
    rectangles: dict[tuple[int, _Color, float, float], list[tuple[float, float]]] = {}
    gap, thinnest = 1.6 / px_per_time, 0.6 / px_per_time
    for run in _runs(bars):
        color, right = _shade(run[0]), run[-1].left + run[-1].width
        inner_gap = gap if min(bar.width for bar in run) > 5 * gap else 0.0
        if len(run) > 1 and inner_gap:
            faint = _mixed_with_white(color, 0.35)
            span = (run[0].left, right - run[0].left - gap)
            rectangles.setdefault((1, faint, run[0].top, run[0].height), []).append(span)
        spans = [(bar.left, bar.width - inner_gap) for bar in run[:-1]]
        spans.append((run[-1].left, run[-1].width - min(gap, 0.2 * run[-1].width)))
        length = right - run[0].left
        if not inner_gap and sum(bar.width for bar in run) > 0.97 * length:
            spans = [(run[0].left, length - min(gap, 0.2 * length))]  # seams would drown the units
        rectangles.setdefault((2, color, run[0].top, run[0].height), []).extend(
            (left, max(width, thinnest)) for left, width in spans
        )
    for (zorder, color, top, height), spans in rectangles.items():
        # Unsnapped, bars thinner than a pixel are blended, and a crowd of them looks as busy as it was.
        axes.broken_barh(spans, (top, height * 0.96), facecolors=[color], linewidth=0, zorder=zorder, snap=False)


def _shade(bar: Bar) -> _Color:
    """The family's colour, a little lighter for units of odd index, so that neighbours can be told apart."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(FAMILY_COLORS[bar.family]))
    if bar.unit is not None and bar.unit % 2:
        lightness += 0.08
    return colorsys.hls_to_rgb(hue, lightness, saturation)


def _mixed_with_white(color: _Color, share: float) -> _Color:
    red, green, blue = (part + (1 - part) * share for part in color)
    return red, green, blue


def write_unit_labels(
    axes: Any, bars: Sequence[Bar], unit_names: Sequence[str], px_per_time: float, px_per_row: float
) -> None:
    """Write a unit's short name in its bars, or once across neighbouring bars of the same unit and kind."""
    for run in _runs(bars):
        if run[0].height * px_per_row < 20 or run[0].unit is None:
            continue
        label = _short_name(unit_name(run[0].unit, unit_names))
        needed_px = (len(label) + 0.6) * _LABEL_CHARACTER_PX
        spans = [(bar.left, bar.left + bar.width) for bar in run]
        if min(right - left for left, right in spans) * px_per_time < needed_px:
            spans = [(spans[0][0], spans[-1][1])]
        for left, right in spans:
            if (right - left) * px_per_time >= needed_px:
                axes.text(
                    (left + right) / 2,
                    run[0].top + run[0].height / 2,
                    label,
                    ha="center",
                    va="center_baseline",
                    fontsize=6.5,
                    fontweight="bold",
                    color="white",
                    zorder=3,
                )


def _runs(bars: Sequence[Bar]) -> list[list[Bar]]:
    """``bars`` in groups that follow each other closely in one lane and share unit and family."""
    runs: dict[float, list[list[Bar]]] = {}
    for bar in bars:
        lane_runs = runs.setdefault(bar.top, [])
        previous = lane_runs[-1][-1] if lane_runs else None
        if (
            previous is not None
            and (previous.unit, previous.family) == (bar.unit, bar.family)
            and bar.left - (previous.left + previous.width) <= 0.15 * bar.width
        ):
            lane_runs[-1].append(bar)
        else:
            lane_runs.append([bar])
    return [run for lane_runs in runs.values() for run in lane_runs]


def _short_name(name: str) -> str:
    number = re.search(r"\d+(?:\s*[-–]\s*\d+)?$", name)
    return number[0] if number else name[:1].upper()
