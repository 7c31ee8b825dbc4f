#!/usr/bin/env python3
"""Cut the power under a training run again and again; resumed each time, it must end bitwise as one left alone.

    python scripts/power_cut.py FOLDER [--cuts 100] [--seed 0]

The run's folder lies on an ext4 file system of its own, in a file of FOLDER. At a random moment, or within two
milliseconds of a commit, the file system is shut down as a power cut would (the ioctl that xfstests calls "godown":
what was not flushed is lost, the journal is as the disk has it). The run must then end with one clear error. The file
system is mounted again and the run resumed under other settings, in a process of its own. Every snapshot that the run
had taken must be there; in the end weights, master weights, both Adam moments, and the losses in metrics.jsonl, are
compared with those of a run that was never interrupted. Linux, as root. FOLDER must not exist.
"""

import argparse
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from kill_test import LAST_STEPS, begin, compare_with_whole, other_settings, settings, steps_in, wait_for_commit
from rich.console import Console

from greedysnake.cli.training import resume_training
from greedysnake.errors import GreedySnakeError
from greedysnake.report.metrics import read_metrics

DISK_MIB = 64
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN
WITH_JOURNAL, WITHOUT_JOURNAL = 1, 2
PATIENCE_S = 60.0
ONE_ERROR = "ended by: "


class Disk:
    """A file system in a file.

    Args:
        image: the file, to be made.
        folder: where it is mounted, to be made.

    Raises:
        SystemExit: there are no rights, or no tools, for it.
    """

    def __init__(self, image: Path, folder: Path) -> None:
        self.folder = folder
        with image.open("wb") as file:
            file.truncate(DISK_MIB * 2**20)
        folder.mkdir()
        try:
            _run("mkfs.ext4", "-q", image)
            self._device = _run("losetup", "--show", "--find", image).strip()
            _run("blockdev", "--setrw", self._device)
            _run("mount", self._device, folder)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"a file system cannot be made here: {getattr(error, 'stderr', None) or error}")

    def cut(self, how: int) -> None:
        """Cut its power."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", how))
        os.close(descriptor)

    def restart(self) -> None:
        """Mount it again, as the next start of the machine does."""
        _run("umount", self.folder)
        _run("mount", self._device, self.folder)

    def remove(self) -> None:
        """Give everything back."""
        subprocess.run(["umount", "--lazy", self.folder], check=False)
        subprocess.run(["losetup", "--detach", self._device], check=False)


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass
class Tally:
    """How the lives of the run ended.

    Attributes:
        at_random: cut off at a random moment.
        at_commit: cut off within two milliseconds of a commit's beginning or end.
        before_training: cut off before the run had taken up its last snapshot.
        steps: the step after which the last snapshot was found each time.
    """

    at_random: int = 0
    at_commit: int = 0
    before_training: int = 0
    steps: list[int] = field(default_factory=list)


def noted_steps(run: Path) -> int:
    """Steps whose lines a life has written, on the disk or not."""
    path = run / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when something is so, or after a minute."""
    end = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def live(run: Path, overrides: list[str], log: Path) -> int:
    """Start a life of the run in a process of its own; its process number."""
    with log.open("w") as file:  # before the fork: a life may be too short to make it
        child = os.fork()
        if child:
            return child
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                resume_training(run, overrides, Console(file=file, soft_wrap=True))
            except GreedySnakeError as error:
                print(f"{ONE_ERROR}{error}", file=file, flush=True)
            except BaseException:
                traceback.print_exc(file=file)
            file.flush()
        finally:
            os._exit(0)


def end_of(child: int, log: Path) -> None:
    """Wait until a life has ended, which it must by itself, with an error that says why.

    Raises:
        SystemExit: it did not.
    """
    handle = os.pidfd_open(child)
    ended = select.select([handle], [], [], PATIENCE_S)[0]
    os.close(handle)
    if not ended:
        os.kill(child, signal.SIGKILL)
        sys.exit(f"a life did not end when its disk had gone:\n{log.read_text()}")
    os.waitpid(child, 0)
    text = log.read_text()
    if text.count(ONE_ERROR) != 1 or "Traceback" in text:
        sys.exit(f"a life ended without an error when its disk had gone:\n{text}")


def cut_repeatedly(disk: Disk, folder: Path, cuts: int, draw: random.Random) -> Tally:
    """The lives of the run.

    Raises:
        SystemExit: a snapshot that had been taken was not there.
    """
    run, tally = disk.folder / "run", Tally()
    for number in range(cuts):
        before, log, overrides = steps_in(run / "store"), folder / "life.log", other_settings(draw)
        every = int(next(value for name, _, value in (o.partition("=") for o in overrides) if "snapshot" in name))
        child = live(run, overrides, log)
        if number % 2:
            found = wait_for_commit(run / "store", draw, patience_s=20)
            tally.at_commit += found
            tally.at_random += not found
        else:
            if number % 4:
                wait_for(lambda log=log: "Going on" in log.read_text())
            time.sleep(draw.random() ** 2 * 2)
            tally.at_random += 1
        noted = noted_steps(run) if "Going on" in log.read_text() else 0  # lines of an earlier life are cut by then
        disk.cut(draw.choice([WITH_JOURNAL, WITHOUT_JOURNAL, WITHOUT_JOURNAL]))
        end_of(child, log)
        tally.before_training += "Going on" not in log.read_text()
        disk.restart()
        found_steps = steps_in(run / "store")
        # the snapshot of a step is taken in the next one, so before that one's line is written
        promised = max(before, (noted - 1) // every * every)
        if found_steps < promised:
            sys.exit(f"life {number} had taken the snapshot of step {promised}, and that of {found_steps} is there")
        tally.steps.append(found_steps)
        if (number + 1) % max(1, cuts // 10) == 0:
            print(f"{number + 1:>6} cuts, at step {tally.steps[-1]:,}", flush=True)
    return tally


def main() -> int:
    """Cut, resume, compare."""
    parser = argparse.ArgumentParser(description="Cut the power under a training run again and again.")
    parser.add_argument("folder", type=Path, help="folder to make for the runs")
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing stays mounted
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True)
    disk = Disk(folder / "disk.img", folder / "disk")
    try:
        return compare(disk, folder, arguments.cuts, random.Random(arguments.seed))
    finally:
        disk.remove()


def compare(disk: Disk, folder: Path, cuts: int, draw: random.Random) -> int:
    """The run whose power is cut, and one that is left alone."""
    quiet, start = Console(file=(folder / "log").open("w")), time.time()
    config = settings(disk.folder, 2)
    os.sync()  # the text is not the run's to flush
    begin(config, quiet)
    tally = cut_repeatedly(disk, folder, cuts, draw)
    told = (
        f"{cuts} power cuts in {time.time() - start:.0f} s: {tally.at_random} at random, {tally.at_commit} within 2 ms "
        f"of a commit, {tally.before_training} before the run had gone on"
    )
    return compare_with_whole(disk.folder, folder / "whole", told, tally.steps[-1] + LAST_STEPS, quiet)


if __name__ == "__main__":
    sys.exit(main())
