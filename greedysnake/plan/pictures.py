"""The roofline as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from greedysnake.errors import GreedySnakeError
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.roofline import RooflinePoint

_BASELINE = "#d96f2b"


def draw_roofline(query: PlanQuery, points: Sequence[RooflinePoint], path: Path) -> None:
    """Write the picture.

    Raises:
        GreedySnakeError: the file cannot be written.
    """
    try:
        roofline_figure(query, points).savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise GreedySnakeError(f"{path}: cannot be written: {error}") from error


def roofline_figure(query: PlanQuery, points: Sequence[RooflinePoint]) -> Figure:
    """Tokens per second against the batch: what was simulated, under what would be ideal and under the roofs."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    x = [point.sequences for point in points]
    roofs = [point.compute_roof for point in points]
    axes.plot(x, roofs, color="#7d4fa8", ls="--", lw=1.4, label="computation's roof, activations recomputed")
    io = [point.io_roof for point in points]
    axes.plot(x, io, color="#3a9fb3", ls="--", lw=1.4, label="I/O's roof, nothing kept in host memory")
    ours = [(point.sequences, point.ours, point.ideal) for point in points if point.ours is not None]
    if ours:
        sizes, reached, ideal = zip(*ours, strict=True)
        axes.plot(sizes, reached, color="#2f6db5", marker="o", lw=2.2, label="GreedySnake, simulated")
        axes.plot(sizes, ideal, color="#2f6db5", ls=":", lw=1.6, label="the ideal: the same work, all overlapped")
    baseline = [point.baseline for point in points]
    axes.plot(x, baseline, color=_BASELINE, marker="s", lw=1.8, label="ZeRO-Infinity's order, simulated")
    too_large = [(point.sequences, point.baseline) for point in points if not point.baseline_fits]
    if too_large:
        axes.plot(
            *zip(*too_large, strict=True),
            color=_BASELINE,
            marker="s",
            markerfacecolor="white",
            ls="",
            label="the same where its gradients do not fit in host memory",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    values = [*baseline, *(value for _, value, _ in ours)]
    axes.set_ylim(0.6 * min(values), 1.6 * max(*values, points[-1].compute_roof))
    axes.set_xticks(x, [str(value) for value in x])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"sequences of {query.tokens} tokens in a step")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{query.workload.name} on {query.hardware.name}: predicted", loc="left", fontsize=11)
    axes.grid(which="major", color="#d9dee5", lw=0.6)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
