"""Pictures open, have their size, and show what they should; matplotlib's global state stays as it was."""

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from greedysnake.report.events import OperationEvent
from greedysnake.report.pictures import draw_loss_curve, draw_timeline

UNIT_NAMES = ["embedding", "layer 0", "layer 1", "layers 2-3", "head"]


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1600, 600)
        return np.asarray(image.convert("RGB")).astype(int)


def count(picture: np.ndarray, red: int, green: int, blue: int) -> int:
    """Pixels close to a colour."""
    return int((np.abs(picture - (red, green, blue)).max(axis=2) < 12).sum())


def event(kind, resource, start_s, end_s, *, unit=1, micro_batch=0) -> OperationEvent:
    return OperationEvent(
        kind=kind,
        resource=resource,
        unit=unit,
        micro_batch=micro_batch,
        chunk=None,
        start_s=start_s,
        end_s=end_s,
        bytes=0,
    )


def snake(layers: int, micro_batches: int) -> list[OperationEvent]:
    """Forward and backward in snake order, with reads that overlap each other."""
    events, now = [], 1000.0
    for phase, seconds, units in (
        ("forward", 0.01, range(layers)),
        ("backward", 0.03, reversed(range(layers))),
    ):
        for unit in units:
            order = range(micro_batches) if unit % 2 == 0 else reversed(range(micro_batches))
            events.append(event("load_weights", "ssd_read", now, now + 0.06, unit=unit, micro_batch=None))
            for micro_batch in order:
                events.append(event(phase, "compute", now, now + seconds, unit=unit, micro_batch=micro_batch))
                now += seconds
    return events


def test_loss_curve_shows_training_and_evaluation(tmp_path):
    generator = np.random.default_rng(0)
    train = [(step, 2 + 8 / step + generator.normal(0, 0.05)) for step in range(1, 301)]
    draw_loss_curve(tmp_path / "both.png", train, [(step, 2.1 + 8 / step) for step in range(50, 301, 50)])
    both = pixels(tmp_path / "both.png")
    assert count(both, 0x2F, 0x6F, 0xBB) > 500
    assert count(both, 0xD9, 0x72, 0x2E) > 500
    draw_loss_curve(tmp_path / "train.png", train, [])
    assert count(pixels(tmp_path / "train.png"), 0xD9, 0x72, 0x2E) == 0


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        ([], []),
        ([(1, float("nan"))], []),
        ([(1, 3.0)], []),
        ([(5, 2.0), (5, 2.0), (6, 2.0)], [(6, 2.0)]),
        ([], [(10, 2.5)]),
        ([(step, 1e30 if step == 50 else 2.0 + 1 / step) for step in range(1, 101)], []),
    ],
)
def test_loss_curve_of_odd_runs(tmp_path, train, evaluation):
    draw_loss_curve(tmp_path / "loss.png", train, evaluation)
    assert np.ptp(pixels(tmp_path / "loss.png")) > 100


@pytest.mark.parametrize(("layers", "micro_batches"), [(5, 2), (24, 8)])
def test_timeline_shows_every_family(tmp_path, layers, micro_batches):
    draw_timeline(tmp_path / "line.png", snake(layers, micro_batches), UNIT_NAMES, "A step")
    picture = pixels(tmp_path / "line.png")
    for color in ((0x2F, 0x6D, 0xB5), (0xD9, 0x6F, 0x2B), (0x3A, 0x9F, 0xB3)):
        assert count(picture, *color) > 2000
    assert count(picture, 0x7D, 0x4F, 0xA8) == 0  # no head ran


def test_timeline_area_follows_time(tmp_path):
    events = [event("forward", "compute", 0, 0.25, unit=0), event("backward", "compute", 0.25, 1.0, unit=0)]
    draw_timeline(tmp_path / "line.png", events, UNIT_NAMES, "")
    picture = pixels(tmp_path / "line.png")
    ratio = count(picture, 0xD9, 0x6F, 0x2B) / count(picture, 0x2F, 0x6D, 0xB5)
    assert ratio == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    "events", [[], [event("forward", "compute", 5.0, 5.0)], [event("new_kind", "cpu", 0, 1e-6, unit=None)]]
)
def test_timeline_of_odd_steps(tmp_path, events):
    draw_timeline(tmp_path / "line.png", events, UNIT_NAMES, "A title that is much too long " * 5)
    assert np.ptp(pixels(tmp_path / "line.png")) > 100


def test_the_same_run_gives_the_same_file_and_settings_stay(tmp_path):
    before = dict(mpl.rcParams)
    for name in ("a.png", "b.png"):
        draw_timeline(tmp_path / name, snake(2, 2), UNIT_NAMES, "A step")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert dict(mpl.rcParams) == before
