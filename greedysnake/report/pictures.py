"""Pictures of a run as PNG files of 1600 x 600 pixels: the loss curve, and the timeline of a step."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from greedysnake.report.bars import FAMILY_COLORS, ROW_FILL, bars_of, draw_bars, write_unit_labels
from greedysnake.report.events import RESOURCES, OperationEvent, resource_words
from greedysnake.report.trace import busy_shares

_WIDTH_PX, _HEIGHT_PX, _DPI = 1600, 600, 200
_INK, _FAINT_INK, _GRID = "#22272e", "#6b7480", "#e4e7eb"
_TRAINING, _EVALUATION = "#2f6fbb", "#d9722e"


def draw_loss_curve(
    path: str | os.PathLike[str],
    train: Sequence[tuple[int, float]],
    evaluation: Sequence[tuple[int, float]],
) -> None:
    """Draw training loss (faint, and smoothed) and evaluation loss (points) over steps.

    Losses that are not finite (skipped steps) are left out. Of a step that appears twice, as in a resumed
    run, the later value counts.

    Args:
        path: the PNG file to write or replace.
        train: (step, loss) of training steps.
        evaluation: (step, loss) of evaluations; may be empty.

    Raises:
        OSError: the file cannot be written.
    """
    figure, axes = _new_figure("Loss")
    figure.subplots_adjust(left=0.078, right=0.925, top=0.885, bottom=0.145)
    train_steps, train_losses = _finite_points(train)
    evaluation_steps, evaluation_losses = _finite_points(evaluation)
    ends: list[tuple[float, float, str]] = []
    if train_steps.size:
        smooth = _smoothed(np.minimum(train_losses, _loss_range(train_losses, evaluation_losses)[1]))
        is_smoother = train_losses.size > 2
        axes.plot(
            train_steps,
            train_losses,
            color=_TRAINING,
            alpha=0.28 if is_smoother else 1.0,
            linewidth=0.7,
            marker="." if train_losses.size == 1 else None,
            label="training, each step",
        )
        if is_smoother:
            axes.plot(
                train_steps,
                smooth,
                color=_TRAINING,
                linewidth=1.6,
                solid_joinstyle="round",
                label="training, smoothed",
            )
        ends.append((train_steps[-1], smooth[-1], _TRAINING))
    if evaluation_steps.size:
        axes.plot(
            evaluation_steps,
            evaluation_losses,
            color=_EVALUATION,
            linewidth=1.2,
            marker="o",
            markersize=4.2,
            markeredgecolor="white",
            markeredgewidth=0.7,
            label="evaluation",
            zorder=3,
        )
        ends.append((evaluation_steps[-1], evaluation_losses[-1], _EVALUATION))
    axes.set_xlabel("step", fontsize=8, color=_FAINT_INK)
    figure.text(0.014, 0.515, "loss (mean per token)", fontsize=8, color=_FAINT_INK, rotation=90, va="center")
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    if ends:
        low, high = _loss_range(train_losses, evaluation_losses)
        axes.set_ylim(low, high)
        first = min(steps[0] for steps in (train_steps, evaluation_steps) if steps.size)
        last = max(end[0] for end in ends)
        lone = 0.5 * (last == first)
        axes.set_xlim(first - lone, last + lone)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
        for points in axes.lines:
            points.set_clip_on(points.get_marker() not in ("o", "."))  # the last point sits on the frame
        _write_end_values(axes, ends, low, high)
        _add_legend(figure, *axes.get_legend_handles_labels())
    else:
        _write_empty(axes, "no finite loss was recorded")
    _save(figure, path)


def draw_timeline(
    path: str | os.PathLike[str],
    events: Sequence[OperationEvent],
    unit_names: Sequence[str],
    title: str,
) -> None:
    """Draw operations over time: a row for each resource that was used, with its busy share at the right.

    Bars are coloured by what was done; neighbouring units differ in shade. Bars that are wide enough carry
    the number at the end of their unit's name, or its first letter: 3 for 'layer 3', E for 'embedding'.

    Args:
        path: the PNG file to write or replace.
        events: the operations, usually those of one step.
        unit_names: the name of unit 0, unit 1, ...
        title: what the picture shows; written above it.

    Raises:
        OSError: the file cannot be written.
    """
    figure, axes = _new_figure(title)
    figure.subplots_adjust(left=0.137, right=0.94, top=0.885, bottom=0.145)
    axes.spines["left"].set_visible(False)
    origin = min((event.start_s for event in events), default=0.0)
    seconds = max((event.end_s for event in events), default=0.0) - origin
    if not seconds > 0:
        _write_empty(axes, "no operation was recorded")
        _save(figure, path)
        return

    scale, time_unit = (1.0, "seconds") if seconds >= 1 else (1e3, "milliseconds")
    rows = [resource for resource in RESOURCES if any(event.resource == resource for event in events)]
    axes.set_xlim(0, seconds * scale)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes_box = axes.get_position()
    px_per_time = axes_box.width * _WIDTH_PX / (seconds * scale)
    px_per_row = axes_box.height * _HEIGHT_PX / len(rows)
    shares = busy_shares(events, seconds)
    families = set()
    for index, resource in enumerate(rows):
        axes.axhspan(index - ROW_FILL / 2, index + ROW_FILL / 2, color="#f4f5f7", linewidth=0, zorder=0)
        bars = bars_of([e for e in events if e.resource == resource], index, origin, scale)
        families |= {bar.family for bar in bars}
        draw_bars(axes, bars, px_per_time)
        write_unit_labels(axes, bars, unit_names, px_per_time, px_per_row)
        axes.text(
            1.008,
            index,
            f"{shares[resource]:.0%}",
            transform=axes.get_yaxis_transform(),
            va="center_baseline",
            fontsize=9,
            fontweight="bold",
            color=_INK,
        )
    figure.text(0.9465, 0.94, "busy", fontsize=8, color=_FAINT_INK, va="center")
    axes.set_yticks(range(len(rows)), [resource_words(resource) for resource in rows])
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(time_unit, fontsize=8, color=_FAINT_INK)
    shown = [family for family in FAMILY_COLORS if family in families]
    _add_legend(figure, [Patch(color=FAMILY_COLORS[family]) for family in shown], shown)
    _save(figure, path)


def _finite_points(points: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps in ascending order and their losses."""
    losses = {step: loss for step, loss in points if loss is not None and np.isfinite(loss)}
    steps = sorted(losses)
    return np.array(steps, dtype=float), np.array([losses[step] for step in steps], dtype=float)


def _smoothed(losses: np.ndarray) -> np.ndarray:
    """A Gaussian mean: wider for longer runs, narrow at the start, where losses fall too fast to average."""
    widest = float(np.clip(losses.size / 60, 0.7, 150))
    smooth = np.empty_like(losses)
    for index in range(losses.size):
        sigma = float(np.clip(index / 3, max(0.5, widest / 10), widest))
        near = np.arange(max(0, index - int(3 * sigma)), min(losses.size, index + int(3 * sigma) + 1))
        weights = np.exp(-0.5 * ((near - index) / sigma) ** 2)
        smooth[index] = weights @ losses[near] / weights.sum()
    return smooth


def _loss_range(train: np.ndarray, evaluation: np.ndarray) -> tuple[float, float]:
    """Limits of the loss axis: everything, save for lone training spikes that would flatten the rest."""
    low = min(values.min() for values in (train, evaluation) if values.size)
    high = max(values.max() for values in (train, evaluation) if values.size)
    if train.size >= 20:
        usual = float(np.percentile(train, 99))
        if evaluation.size:
            usual = max(usual, evaluation.max())
        if high - low > 2 * (usual - low) > 0:
            high = usual + 0.3 * (usual - low)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin


def _write_end_values(axes: Any, ends: Sequence[tuple[float, float, str]], low: float, high: float) -> None:
    """Write the final values right of the lines, pushed apart where they would touch."""
    apart = 0.075 * (high - low)
    heights = [value for _, value, _ in ends]
    if len(ends) == 2 and (missing := apart - abs(heights[0] - heights[1])) > 0:
        upper = int(heights[1] >= heights[0])
        heights[upper] += missing / 2
        heights[1 - upper] -= missing / 2
    for (_, value, color), height in zip(ends, heights, strict=True):
        axes.text(
            1.009,
            (height - low) / (high - low),
            f"{value:.3f}",
            transform=axes.transAxes,
            va="center_baseline",
            fontsize=9,
            fontweight="bold",
            color=color,
        )


def _new_figure(title: str) -> tuple[Figure, Any]:
    """A figure with one pair of axes in this package's style; settings of pyplot have no part in it."""
    figure = Figure(figsize=(_WIDTH_PX / _DPI, _HEIGHT_PX / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.012, 0.94, title, fontsize=10, fontweight="bold", color=_INK, va="center")
    axes = figure.add_subplot(facecolor="white")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b6bdc6")
        axes.spines[side].set_linewidth(0.7)
    axes.tick_params(labelsize=8, labelcolor=_FAINT_INK, color="#b6bdc6", width=0.7, length=2.5)
    axes.set_axisbelow(True)
    return figure, axes


def _add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Write the legend at the top right, and the title beside it smaller where the two would meet."""
    crowded = len(labels) > 6
    legend = figure.legend(
        handles,
        labels,
        loc="center right",
        bbox_to_anchor=(0.932, 0.942),
        ncols=len(labels),
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
        handlelength=0.8 if crowded else 1.5,
        handletextpad=0.4 if crowded else 0.5,
        columnspacing=0.9 if crowded else 1.3,
        borderaxespad=0,
    )
    title = figure.texts[0]
    box = title.get_window_extent()
    room_px = legend.get_window_extent().x0 - box.x0 - 20
    title.set_fontsize(title.get_fontsize() * min(1.0, room_px / max(box.width, 1.0)))


def _write_empty(axes: Any, words: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", fontsize=10, color=_FAINT_INK)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    # Without matplotlib's version in it, the same run gives the same file.
    figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})
