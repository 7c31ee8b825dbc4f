"""Real disks that fail under the command line: full, limited, gone; one message, no traceback, and the run goes on."""

import contextlib
import errno
import functools
import itertools
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from small_run import write_config
from test_cli import command  # noqa: F401

from greedysnake.report.metrics import read_metrics
from greedysnake.storage import System


@pytest.fixture
def config(tmp_path) -> Path:
    return write_config(tmp_path, training={"eval_every": None}, optimizer={"lr_schedule": "constant"})


def endless(config: Path, *overrides: str, before: Callable[[], None] | None = None) -> Command:
    """A run that only an error ends."""
    return Command(["train", config, "training.steps=1000000", *overrides], config.with_name("log"), before)


def saved_step(run: Path, store: Path, output: str) -> int:
    """The step that the ending names, with what to do."""
    (line,) = [line for line in output.splitlines() if line.startswith("Saved: the state after step ")]
    assert f"in {store}" in line
    assert f"greedysnake resume {run}" in line
    return int(line.removeprefix("Saved: the state after step ").partition(",")[0])


def told(ending: tuple[int | None, str]) -> str:
    """What a command says that ends with an error: one, and never a traceback."""
    status, output = ending
    assert status == 1, output
    assert "Traceback" not in output
    assert output.count("error:") == 1
    return output


@pytest.fixture
def goes_on(tmp_path, config, command) -> Callable[[Path, Path, str], None]:  # noqa: F811
    """Resumes a run as its ending says; it must go on as one that nothing happened to."""

    def check(run: Path, store: Path, output: str) -> None:
        steps = saved_step(run, store, output)
        status, output, errors = command("verify", run)
        assert status == 0, errors
        found = int(output.partition("the state after step ")[2].partition(",")[0])
        assert found in (steps, steps + 1)  # one more if the commit that failed was all but done
        more = f"training.steps={found + 2}"
        status, output, errors = command("resume", run, more)
        assert status == 0, errors
        assert f"Going on after step {found} of {found + 2}" in output
        assert command("train", config, more, f"run={tmp_path / 'whole'}")[0] == 0
        ours, theirs = (
            {line["step"]: line["loss"] for line in read_metrics(one / "metrics.jsonl")}
            for one in (run, tmp_path / "whole")
        )
        assert {found + 1, found + 2} <= ours.keys() <= theirs.keys()
        assert ours == {step: theirs[step] for step in ours}

    return check


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system in memory of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Take all of a disk."""
    path = folder / "something else"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)
    return path


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_file_size_limit_is_met_before_the_first_step(tmp_path, config):
    output = told(endless(config, before=limit_file_size).ending())
    assert f"cannot reserve 589,824 bytes for {tmp_path}/run/store/slot0.bin: File too large. Free space" in output
    assert not (tmp_path / "run").exists()


def test_the_storage_disk_is_full(tmp_path, config, goes_on, small_disk):
    run = endless(config, f"engine.storage=[{small_disk / 'store'}]")
    run.wait_for_steps(tmp_path / "run", 3)
    filling = fill(small_disk)
    output = told(run.ending())
    assert f"error: cannot write {small_disk}/store/manifest.json: No space left on device" in output
    filling.unlink()
    goes_on(tmp_path / "run", small_disk / "store", output)


def test_the_disk_of_the_run_folder_is_full(tmp_path, config, goes_on, small_disk):
    run = endless(config, f"run={small_disk / 'run'}", f"engine.storage=[{tmp_path / 'store'}]")
    run.wait_for_steps(small_disk / "run", 3)
    filling = fill(small_disk)
    output = told(run.ending())
    assert f"error: cannot write to the run folder {small_disk}/run: No space left on device" in output
    filling.unlink()
    goes_on(small_disk / "run", tmp_path / "store", output)


def test_the_storage_folder_is_gone(tmp_path, config, goes_on):
    run = endless(config, f"engine.storage=[{tmp_path / 'store'}]")
    run.wait_for_steps(tmp_path / "run", 3)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    output = told(run.ending())
    assert f"error: cannot write {tmp_path}/store/manifest.json: No such file or directory" in output
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    goes_on(tmp_path / "run", tmp_path / "store", output)


def fail_after(call: str, count: int, code: int) -> None:
    """Have a system call of the store fail from then on."""
    calls, real = itertools.count(), getattr(System, call)

    def fail(self: System, *given: Any) -> Any:
        if next(calls) >= count:
            raise OSError(code, os.strerror(code))
        return real(self, *given)

    setattr(System, call, fail)


@pytest.mark.parametrize(("call", "code"), [("preadv", errno.EIO), ("pwritev", errno.EROFS)])
def test_a_disk_that_fails(tmp_path, config, goes_on, call, code):
    output = told(endless(config, before=functools.partial(fail_after, call, 100, code)).ending())
    assert f"error: cannot {'read' if call == 'preadv' else 'write'} " in output
    assert os.strerror(code) in output
    goes_on(tmp_path / "run", tmp_path / "run" / "store", output)
