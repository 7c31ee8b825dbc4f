"""The line that a person watches while a run trains."""

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from greedysnake.report.progress import Progress, plain_line, progress_line

_REFRESHES_PER_SECOND = 2
_PLAIN_SHARE = 0.05  # of all steps, after which a plain line is due


class LiveLine:
    """Shows how a run goes: one line that updates itself on a terminal, now and then a plain line elsewhere.

    Use it as a context manager; leaving it, also by Ctrl-C, gives the terminal back, the last state shown.
    What other code prints to stdout or stderr meanwhile appears above the line.

    Args:
        console: where to write; None: standard output.
        live: True for the updating line, False for plain lines; None: updating if ``console`` is a terminal.
        plain_interval_s: in plain mode, a line is printed when so many seconds or 5 % of the steps have
            passed since the last, and for the first and the last step.
        clock: seconds on a monotonic clock; tests pass their own.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        plain_interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console() if console is None else console
        # The file is asked, too: with FORCE_COLOR set, rich takes a CI log for a terminal.
        is_live = self._console.is_interactive and self._console.file.isatty() if live is None else live
        self._plain_interval_s = plain_interval_s
        self._clock = clock
        self._progress: Progress | None = None
        self._updated_s = 0.0
        self._printed: tuple[int, float] | None = None  # step and time of the last plain line
        self._live = Live(self, console=self._console, refresh_per_second=_REFRESHES_PER_SECOND) if is_live else None

    def update(
        self,
        step: int,
        steps: int,
        *,
        loss: float,
        tokens_per_second: float | None = None,
        eta_s: float | None = None,
        bottleneck: str | None = None,
        read_rate: float | None = None,
        write_rate: float | None = None,
        host_bytes: int | None = None,
    ) -> None:
        """Show the state after ``step`` of ``steps``; what is None is left out.

        Args:
            step: steps done.
            steps: steps of the whole run.
            loss: the last step's loss.
            tokens_per_second: the rate of training.
            eta_s: seconds until the run ends; on a terminal they count down until the next update.
            bottleneck: the resource that limits the run now, such as ``ssd_read``.
            read_rate: bytes per second read from SSD.
            write_rate: bytes per second written to SSD.
            host_bytes: host memory in use.
        """
        self._progress = Progress(
            step=step,
            steps=steps,
            loss=loss,
            tokens_per_second=tokens_per_second,
            eta_s=eta_s,
            bottleneck=bottleneck,
            read_rate=read_rate,
            write_rate=write_rate,
            host_bytes=host_bytes,
        )
        self._updated_s = self._clock()
        if self._live is not None:
            if self._live.is_started:
                self._live.refresh()
        elif self._is_plain_line_due(step, steps):
            self._printed = (step, self._updated_s)
            self.message(plain_line(self._progress))

    def message(self, text: str) -> None:
        """Print ``text`` above the line, as it is: brackets in it are no markup."""
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line as rich draws it, for the width that the terminal has just now."""
        if self._progress is None:
            yield Text("waiting for the first step", style="dim")
            return
        waited_s = self._clock() - self._updated_s
        # One column stays free: some terminals wrap when the last one is filled.
        yield progress_line(self._progress, options.max_width - 1, waited_s=waited_s, ascii_only=options.ascii_only)

    def _is_plain_line_due(self, step: int, steps: int) -> bool:
        if self._printed is None or step >= steps:
            return True
        printed_step, printed_s = self._printed
        steps_between = max(1, math.ceil(_PLAIN_SHARE * steps))
        return step - printed_step >= steps_between or self._updated_s - printed_s >= self._plain_interval_s
