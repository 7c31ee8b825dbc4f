"""The command line in processes of its own, which need not load everything anew."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from greedysnake.cli.app import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["greedysnake.cli.training", "greedysnake.cli.loop"])


class Command:
    """A command that runs beside the test.

    Args:
        arguments: of the command line.
        log: file that its output goes to.
        before: called in its process first.
    """

    def __init__(self, arguments: Sequence[str | Path], log: Path, before: Callable[[], None] | None = None) -> None:
        self._log = log
        self.process = _CONTEXT.Process(target=_run, args=([str(argument) for argument in arguments], log, before))
        self.process.start()

    def wait_for_steps(self, run: Path, count: int) -> None:
        """Return when the run has noted so many steps."""
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
            assert self.process.is_alive(), self._log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def ending(self) -> tuple[int | None, str]:
        """Exit status and output."""
        self.process.join(timeout=120)
        self.process.kill()
        self.process.join()
        return self.process.exitcode, self._log.read_text()


def _run(arguments: list[str], log: Path, before: Callable[[], None] | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if before is not None:
        before()
    sys.argv = ["greedysnake", *arguments]
    main()
