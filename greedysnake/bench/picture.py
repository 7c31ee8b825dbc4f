"""The table as a picture: speed, peak memory and bytes moved, a bar for each system in each setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from greedysnake.bench.cells import Setting
from greedysnake.bench.matrix import describe_setting
from greedysnake.bench.smallest import Smallest
from greedysnake.bench.systems import LENT
from greedysnake.bench.table import Line
from greedysnake.units import format_bytes

_DPI, _WIDTH_IN, _ROW_IN, _ABOVE_IN, _BELOW_IN = 200, 8.0, 0.2, 0.55, 0.42
_LEFT = 0.235
"""Where panels begin, as a share of the width, if names are no longer than that."""
_BESIDE_NAMES_IN = 0.14
_INK, _FAINT_INK, _GRID, _WRONG = "#22272e", "#6b7480", "#e4e7eb", "#c0392b"
_COLORS = {
    "greedysnake": "#2f6fbb",
    "greedysnake-streamed": "#6ea3de",
    "horizontal": "#b3cdec",
    "zero-infinity": "#d9722e",
    "zero-infinity-weights-in-memory": "#e08c58",
    "zero-infinity-activations-in-memory": "#e8a67d",
    "zero-infinity-in-memory": "#f0c1a3",
    "zero-infinity-least-memory": "#d9722e",
    "zero-offload": "#b9a06b",
    "zero-offload-activations-in-memory": "#d3c29c",
    "torch": "#8b949e",
    "torch-activations-in-memory": "#a9b0b8",
    "torch-swap": "#c3c9d0",
}
_VARIANT = "#9bbfe6"
_READ_SHADE = 0.55
_LONGEST_PROBLEM = 34
_LIMIT: dict[str, Any] = {"color": _INK, "linewidth": 0.9, "linestyle": (0, (2, 1))}


def draw_table(path: Path, lines: Sequence[Line], title: str) -> None:
    """Draw the lines, in their order; a setting is written above its first line.

    Args:
        path: PNG file to write, 1600 pixels wide.
        lines: of the table, at least one.
        title: above the picture.

    Raises:
        OSError: the file cannot be written.
    """
    places, headings, row = [], [], 0.0
    for index, line in enumerate(lines):
        if index == 0 or line.setting != lines[index - 1].setting:
            headings.append((row, _heading(line.setting, lines)))
            row += 1.05
        places.append(row)
        row += 1
        if index + 1 < len(lines) and lines[index + 1].setting != line.setting:
            row += 0.35
    figure, axes = _figure(title, row, columns=3)
    for panel, words in zip(axes, ("tokens/s", "peak memory, GiB", "read and written, GB a step"), strict=True):
        panel.set_ylim(row - 0.35, -0.6)
        panel.set_xlabel(words, fontsize=8, color=_FAINT_INK)
    axes[0].set_yticks(places, [line.system for line in lines])
    _make_room_for_names(figure, axes[0])
    left = (0.012 - axes[0].get_position().x0) / axes[0].get_position().width
    for place, heading in headings:
        at = {"transform": axes[0].get_yaxis_transform(), "va": "center"}
        axes[0].text(left, place, heading, fontsize=8, fontweight="bold", color=_INK, **at)
    for place, line in zip(places, lines, strict=True):
        _draw_line(axes, place, line)
    for panel in axes:
        _make_room(panel)
    if any(line.setting.memory is not None for line in lines):
        _legend(axes[1], {"limit": Line2D([], [], **_LIMIT)})
    _legend(axes[2], {"read": Patch(color=_FAINT_INK), "written": Patch(color=_FAINT_INK, alpha=_READ_SHADE)})
    figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})


def draw_smallest(path: Path, answers: Sequence[Smallest], title: str) -> None:
    """Draw the smallest memory in which each system trains.

    Args:
        path: PNG file to write, 1600 pixels wide.
        answers: at least one.
        title: above the picture.

    Raises:
        OSError: the file cannot be written.
    """
    figure, (panel,) = _figure(title, len(answers), columns=1)
    panel.set_ylim(len(answers) - 0.35, -0.65)
    panel.set_xlabel("smallest memory limit in which it trains, GiB", fontsize=8, color=_FAINT_INK)
    panel.set_yticks(range(len(answers)), [answer.system for answer in answers])
    _make_room_for_names(figure, panel)
    for place, answer in enumerate(answers):
        if answer.works is None:
            _write(panel, place, "not measured" if answer.fails is None else f"not in {format_bytes(answer.fails)}")
            continue
        size = answer.works / 2**30
        panel.barh(place, size, height=0.72, color=_color(answer.system))
        _label(panel, place, size, f"{size:.2f}")
    figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})


def _draw_line(axes: Sequence[Any], place: float, line: Line) -> None:
    speed, color = line.tokens_per_second, _color(line.system)
    if speed is None:
        _write(axes[0], place, _short(line.problem or "not measured"))
        return
    style: dict[str, Any] = {"height": 0.72, "color": "white" if line.wrong else color}
    if line.wrong:
        style |= {"edgecolor": _WRONG, "hatch": "////", "linewidth": 0.6}
    spread = [[speed.median - speed.least], [speed.most - speed.median]]
    axes[0].barh(place, speed.median, xerr=spread, error_kw={"ecolor": _INK, "elinewidth": 0.8, "capsize": 2}, **style)
    words = _number(speed.median) + ("  wrong losses" if line.wrong else "")
    _label(axes[0], place, speed.most, words, _WRONG if line.wrong else _INK)
    if line.peak_memory_bytes is not None:
        size = line.peak_memory_bytes / 2**30
        axes[1].barh(place, size, **style)
        _label(axes[1], place, size, f"{size:.2f}" if size < 1 else f"{size:.1f}")
        if line.setting.memory is not None:
            limit = line.setting.memory / 2**30
            axes[1].plot([limit, limit], [place - 0.5, place + 0.5], **_LIMIT)
    read, written = (line.read_bytes or 0) / 1e9, (line.written_bytes or 0) / 1e9
    axes[2].barh(place, read, **style)
    axes[2].barh(place, written, left=read, **{**style, "alpha": _READ_SHADE})
    _label(axes[2], place, read + written, _number(read + written))


def _heading(setting: Setting, lines: Sequence[Line]) -> str:
    """A setting, without the model where it is that of all lines; that a disk is not paced where others are."""
    words = describe_setting(setting)
    if setting.disk is None and any(line.setting.disk is not None for line in lines):
        words += ", disk not paced"
    return words.split(", ", 1)[1] if len({line.setting.model for line in lines}) == 1 else words


def _make_room_for_names(figure: Figure, first: Any) -> None:
    """Panels begin at the right of the longest name."""
    names = [label.get_window_extent() for label in first.get_yticklabels()]
    width = max(name.width for name in names) + _DPI * _BESIDE_NAMES_IN
    figure.subplots_adjust(left=max(_LEFT, width / (_DPI * _WIDTH_IN)))


def _make_room(panel: Any) -> None:
    """Room at the right of the longest bar for its number."""
    most = panel.get_xlim()[1]
    panel.set_xlim(0, most * 1.16 if most > 0 else 1)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=4))


def _legend(panel: Any, entries: dict[str, Any]) -> None:
    """Above a panel, at its right."""
    panel.legend(
        list(entries.values()),
        list(entries),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(entries),
        frameon=False,
        fontsize=7,
        labelcolor=_INK,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=0.9,
        borderaxespad=0.2,
    )


def _label(panel: Any, place: float, end: float, words: str, color: str = _INK) -> None:
    panel.annotate(
        words,
        (end, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=7,
        color=color,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
    )


def _write(panel: Any, place: float, words: str) -> None:
    transform = panel.get_yaxis_transform()
    panel.text(
        0.01, place, words, transform=transform, va="center_baseline", fontsize=7, color=_FAINT_INK, style="italic"
    )


def _short(problem: str) -> str:
    """The status, and as much of the reason as there is room for."""
    words = problem.split(":", maxsplit=1)[0]
    return words if words != "failed" else problem[:_LONGEST_PROBLEM]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _color(system: str) -> str:
    return _COLORS.get(system.removesuffix(LENT), _VARIANT)


def _figure(title: str, rows: float, *, columns: int) -> tuple[Figure, list[Any]]:
    """A figure with panels side by side, in this package's style; settings of pyplot have no part in it."""
    height = _ABOVE_IN + _BELOW_IN + _ROW_IN * max(rows, 1)
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.2 / height, title, fontsize=10, fontweight="bold", color=_INK, va="center")
    panels = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=_LEFT, right=0.985, top=1 - _ABOVE_IN / height, bottom=_BELOW_IN / height, wspace=0.07)
    for panel in panels:
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.spines["bottom"].set_color("#b6bdc6")
        panel.spines["bottom"].set_linewidth(0.7)
        panel.tick_params(labelsize=7, labelcolor=_FAINT_INK, color="#b6bdc6", width=0.7, length=2.5)
        panel.tick_params(axis="y", length=0, labelsize=8, labelcolor=_INK)
        panel.grid(axis="x", color=_GRID, linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, list(panels)
