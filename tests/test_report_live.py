"""The live line fits its terminal, leaves it clean, and is plain text everywhere else."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from greedysnake.report.live import LiveLine
from greedysnake.report.progress import Progress, format_duration, plain_line, progress_line

STATE = {
    "loss": 2.3456,
    "tokens_per_second": 1234.4,
    "eta_s": 5025.0,
    "bottleneck": "ssd_read",
    "read_rate": 2.31e9,
    "write_rate": 1.2e9,
    "host_bytes": 13_207_024_435,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_console(file: io.StringIO, width: int = 80, terminal: bool = True) -> Console:
    return Console(file=file, force_terminal=terminal, width=width, color_system="standard", _environ={})


def test_everything_fits_in_80_columns():
    line = progress_line(Progress(step=120, steps=1000, **STATE), 79).plain
    for part in (
        "━",
        "120/1000",
        "loss 2.346",
        "1234 tok/s",
        "r2.3 w1.2 GB/s",
        "12.3G",
        "ssd read",
        "1:23:45",
    ):
        assert part in line


def test_wide_lines_say_more():
    line = progress_line(Progress(step=120, steps=1000, **STATE), 200).plain
    assert line == "━" * 40 + (
        " step 120/1000 · loss 2.346 · 1,234 tokens/s · SSD read 2.31 write 1.20 GB/s"
        " · host memory 12.3 GiB · limited by SSD read · ETA 1:23:45"
    )


def rates(highest: float):
    return st.none() | st.floats(0, highest)


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        Progress,
        step=st.integers(0, 10**6),
        steps=st.integers(0, 10**6),
        loss=st.floats(),
        tokens_per_second=rates(1e7),
        eta_s=rates(1e8),
        bottleneck=st.none() | st.sampled_from(["compute", "h2d", "ssd_write", "something else"]),
        read_rate=rates(1e11),
        write_rate=rates(1e11),
        host_bytes=st.none() | st.integers(0, 2**44),
    ),
    st.integers(1, 220),
    st.booleans(),
)
def test_no_line_is_wider_than_its_terminal(progress, width, ascii_only):
    line = progress_line(progress, width, ascii_only=ascii_only)
    assert line.cell_len <= width
    assert "\n" not in line.plain
    assert line.plain.isascii() or not ascii_only
    assert plain_line(progress).isascii()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0:00"), (42, "0:42"), (725.4, "12:05"), (11229, "3:07:09"), (363600, "4d 05h")],
)
def test_durations(seconds, words):
    assert format_duration(seconds) == words


def test_terminal_line_updates_in_place_and_leaves_the_terminal_clean():
    file = Terminal()

    def interrupted_run() -> None:
        with LiveLine(make_console(file)) as line:
            line.update(1, 10, **STATE)
            line.message("snapshot [bold] at step 1")
            line.update(2, 10, **STATE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    output = file.getvalue()
    assert "\x1b[?25l" in output  # the cursor was hidden
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # and is back
    assert output.index("1/10") < output.index("snapshot [bold] at step 1\n") < output.index("2/10")
    assert output.rindex("\n") > output.rindex("2/10")
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert max(len(part) for part in re.split(r"[\r\n]", drawn)) < 80


def test_time_left_counts_down_between_updates():
    now = [0.0]
    file = Terminal()
    console = make_console(file)
    line = LiveLine(console, clock=lambda: now[0])
    line.update(1, 10, loss=1.0, eta_s=60.0)
    now[0] = 15.0
    console.print(line)
    assert "0:45" in file.getvalue()


@pytest.mark.parametrize("forced", [True, False])
def test_elsewhere_lines_are_plain_and_few(forced):
    now = [0.0]
    file = io.StringIO()  # no terminal, whatever rich was told, as with FORCE_COLOR in a CI log
    with LiveLine(make_console(file, terminal=forced), clock=lambda: now[0]) as line:
        for step in range(1, 1001):
            now[0] += 0.01
            line.update(step, 1000, **STATE)
        line.message("done [1] in /some/folder")
    output = file.getvalue()
    assert re.search(r"[^\x20-\x7e\n]", output) is None
    lines = output.splitlines()
    assert lines[0] == "step 1/1000, " + plain_line(Progress(step=1, steps=1000, **STATE)).split(", ", 1)[1]
    assert lines[-2].startswith("step 1000/1000, ")
    assert lines[-1] == "done [1] in /some/folder"
    assert 20 <= len(lines) <= 23


def test_slow_steps_are_told_as_time_passes():
    now = [0.0]
    file = io.StringIO()
    line = LiveLine(make_console(file), clock=lambda: now[0], plain_interval_s=10)
    for step in range(1, 21):
        now[0] += 4.0
        line.update(step, 100_000, loss=float("nan"))
    assert [text.split(",")[0] for text in file.getvalue().splitlines()] == [
        f"step {step}/100000" for step in (1, 4, 7, 10, 13, 16, 19)
    ]
