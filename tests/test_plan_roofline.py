"""The roofline's points and their picture, on a small model and made-up machines."""

from functools import cache

import pytest
from made_up_machines import GIB, MACHINES, machine, query
from matplotlib import colors

from greedysnake.errors import GreedySnakeError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.pictures import draw_roofline, roofline_figure
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.roofline import RooflinePoint, baseline_residents, roofline_points

COUNTS = (1, 4, 16)


@cache
def points_on(name: str) -> list[RooflinePoint]:
    return roofline_points(query(MACHINES[name]), rows=1, micro_batches=COUNTS)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_no_plan_is_above_the_ideal(name):
    points = points_on(name)
    assert [point.sequences for point in points] == list(COUNTS)
    for point in points:
        assert 0 < point.ours <= point.ideal * (1 + 1e-9)
        assert point.baseline < point.ideal


def test_what_is_drawn_is_what_the_points_say():
    points = points_on("slow disk")
    lines = {line.get_label(): line for line in roofline_figure(query(), points).axes[0].get_lines()}
    for label, name in (
        ("GreedySnake", "ours"),
        ("the ideal", "ideal"),
        ("ZeRO-Infinity", "baseline"),
        ("computation", "compute_roof"),
        ("I/O", "io_roof"),
    ):
        (line,) = (line for text, line in lines.items() if text.startswith(label))
        assert list(line.get_xdata()) == list(COUNTS)
        assert list(line.get_ydata()) == [getattr(point, name) for point in points]
    assert len(lines) == 5


def hollow(asked: PlanQuery, points: list[RooflinePoint]) -> list[float]:
    """Where hollow markers are."""
    lines = roofline_figure(asked, points).axes[0].get_lines()
    found = [line for line in lines if colors.to_rgb(line.get_markerfacecolor()) == (1, 1, 1)]
    return [x for line in found for x in line.get_xdata()]


def test_a_baseline_that_does_not_fit_is_marked():
    """Its 16-bit gradients alone are a GiB."""
    small = query(machine(host_memory=3 * GIB // 2))
    (point,) = points = roofline_points(small, rows=1, micro_batches=(4,))
    assert not point.baseline_fits
    assert baseline_residents(small, BatchShape(micro_batches=4, rows=1, tokens=small.tokens)) == 0.0
    assert hollow(small, points) == [4]
    assert all(point.baseline_fits for point in points_on("accelerator"))
    assert hollow(query(), points_on("accelerator")) == []


def test_a_machine_on_which_no_plan_fits_still_has_roofs():
    tiny = query(machine(host_memory=GIB))
    (point,) = points = roofline_points(tiny, rows=1, micro_batches=(1,))
    assert (point.ours, point.ideal) == (None, None)
    assert len(roofline_figure(tiny, points).axes[0].get_lines()) == 4  # two roofs, the baseline and its mark


def test_a_picture_that_cannot_be_written_is_a_message(tmp_path):
    with pytest.raises(GreedySnakeError, match="cannot be written"):
        draw_roofline(query(), points_on("accelerator"), tmp_path / "nowhere" / "roofline.png")
