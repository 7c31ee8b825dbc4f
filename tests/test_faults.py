"""Training on a disk that fails, falls short or is slow, at the boundary of the system calls."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from architectures import random_batches, small_config

from greedysnake import AdamW, Trainer
from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import durable_extents
from greedysnake.errors import StorageError
from greedysnake.storage import aligned_empty

STEPS = 3
BATCHES = random_batches(STEPS + 1, 2, padding=False)
SETTINGS = {
    "host": {"delayed_share": 0.5},
    "ssd": {"delayed_share": 0.5, "boundaries_on_ssd": 1.0, "gradients": "ssd"},
}

Committed = tuple[int, dict[str, bytes]]
"""How many steps a commit holds, and every chunk's weights and state."""


def trainer_in(folder: Path, tiers: str) -> Trainer:
    config = small_config("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    return Trainer(config, folder, chunk_elements=4096, optimizer=AdamW(lr=1e-2), **SETTINGS[tiers])


def committed_in(folder: Path) -> Committed:
    store, skeleton, contents = open_committed([folder])
    try:
        found = {}
        for key, size in durable_extents(skeleton.layouts).items():
            into = aligned_empty(size)
            store.read(key, into).wait()
            found[key] = bytes(into.numpy())
        return contents["progress"]["steps_done"], found
    finally:
        store.close()


class Disk:
    """Stands before a system call: counts its calls, and treats one of them differently.

    Attributes:
        calls: made so far.
        at: the call, from 1, that ``fault`` answers.
    """

    def __init__(self, monkeypatch, name: str) -> None:
        self._real = getattr(os, name)
        self._lock = threading.Lock()
        self.calls = 0
        self.at = 0
        self.fault: Callable[..., int] | None = None
        monkeypatch.setattr(os, name, self)

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            self.calls += 1
            struck = self.fault is not None and self.at in (0, self.calls)
        if struck:
            return self.fault(self._real, descriptor, buffers, offset)
        return self._real(descriptor, buffers, offset)

    def strike(self, fault: Callable[..., int], at: int = 0) -> None:
        """From now on, let ``fault`` answer the call ``at`` (0: every call)."""
        self.calls, self.at, self.fault = 0, at, fault

    def heal(self) -> None:
        self.fault = None


def failing(code: int) -> Callable[..., int]:
    def fault(real, descriptor, buffers, offset) -> int:
        raise OSError(code, os.strerror(code))

    return fault


def nothing(real, descriptor, buffers, offset) -> int:
    return 0


def short(real, descriptor, buffers, offset) -> int:
    return real(descriptor, [buffers[0][:4096]], offset)


def slow(real, descriptor, buffers, offset) -> int:
    time.sleep(0.03)
    return real(descriptor, buffers, offset)


def some_of(count: int, most: int) -> list[int]:
    """At most ``most`` numbers spread over 1 to ``count``, both included."""
    return sorted({1 + (count - 1) * i // (most - 1) for i in range(most)})


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert {thread.name for thread in threading.enumerate()} <= before


@pytest.fixture(scope="module", params=sorted(SETTINGS))
def run(request, tmp_path_factory) -> tuple[str, list[Committed]]:
    """Tiers, and what a snapshot after each step of an untroubled run holds."""
    folder = tmp_path_factory.mktemp("reference")
    found = []
    with trainer_in(folder / "store", request.param) as trainer:
        for step in range(STEPS + 1):
            if step:
                trainer.step(BATCHES[step - 1])
                trainer.snapshot()
            shutil.copytree(folder / "store", folder / f"copy{step}")
            found.append(committed_in(folder / f"copy{step}"))
    assert [steps for steps, _ in found] == list(range(STEPS + 1))
    return request.param, found


def assert_broken_off(trainer: Trainer, error: pytest.ExceptionInfo, expected: list[Committed]) -> None:
    """A clear error; no further step; closing works; the last snapshot is whole, and the run goes on from it."""
    assert str(trainer.storage) in str(error.value)
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.step(BATCHES[-1])
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.evaluate(BATCHES[-1])
    trainer.close()
    trainer.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("greedysnake")] == []
    assert trainer.last_snapshot >= trainer.steps_done - 1
    assert committed_in(trainer.storage) == expected[trainer.last_snapshot]
    with Trainer.resume(trainer.storage) as resumed:
        assert resumed.steps_done == trainer.last_snapshot
        for batch in BATCHES[resumed.steps_done : STEPS]:
            resumed.step(batch)
    assert committed_in(trainer.storage) == expected[STEPS]


@pytest.mark.parametrize(
    "case",
    [
        ("preadv", failing(errno.EIO), "cannot read .*[.]bin: Input/output error"),
        ("pwritev", failing(errno.EIO), "cannot write .*[.]bin: Input/output error"),
        ("pwritev", failing(errno.ENOSPC), "cannot write .*[.]bin: No space left on device"),
        ("preadv", nothing, "cannot read .*[.]bin at byte .*: the file ends there"),
    ],
    ids=["read fails", "write fails", "disk full", "file too short"],
)
def test_a_call_that_fails_ends_the_run_at_the_last_commit(tmp_path, monkeypatch, run, case):
    tiers, expected = run
    name, fault, message = case
    disk = Disk(monkeypatch, name)
    with trainer_in(tmp_path / "all", tiers) as trainer:
        trainer.step(BATCHES[0])
        disk.calls = 0
        trainer.step(BATCHES[1])
        count = disk.calls
    assert count > 10
    for at in some_of(count, 8):
        trainer = trainer_in(tmp_path / f"at{at}", tiers)
        trainer.step(BATCHES[0])
        disk.strike(fault, at)
        with pytest.raises(StorageError, match=message) as caught:
            trainer.step(BATCHES[1])
        assert "while carrying out operation" in caught.value.__notes__[0]
        disk.heal()
        assert_broken_off(trainer, caught, expected)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_every_call_fails_at_once(tmp_path, monkeypatch, run, name):
    tiers, expected = run
    trainer = trainer_in(tmp_path / "store", tiers)
    for batch in BATCHES[:2]:
        trainer.step(batch)
    disk = Disk(monkeypatch, name)
    disk.strike(failing(errno.EIO))
    with pytest.raises(StorageError) as caught:
        trainer.step(BATCHES[2])
    disk.heal()
    assert_broken_off(trainer, caught, expected)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_closing_on_a_disk_that_fails_keeps_the_last_commit(tmp_path, monkeypatch, run, name):
    tiers, expected = run
    trainer = trainer_in(tmp_path / "store", tiers)
    for batch in BATCHES[:2]:
        trainer.step(batch)
    disk = Disk(monkeypatch, name)
    disk.strike(failing(errno.EIO))
    with pytest.raises(StorageError) as caught:
        trainer.close()
    disk.heal()
    assert_broken_off(trainer, caught, expected)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_new_run_on_a_disk_that_fails_leaves_the_folder_free(tmp_path, monkeypatch, run, name):
    tiers, expected = run
    disk = Disk(monkeypatch, name)
    trainer_in(tmp_path / "whole", tiers).close()
    for at in some_of(disk.calls, 3):
        folder = tmp_path / f"at{at}"
        disk.strike(failing(errno.EIO), at)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            trainer_in(folder, tiers)
        disk.heal()
        assert str(folder) in str(caught.value)
        trainer_in(folder, tiers).close()
        assert committed_in(folder) == expected[0]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_commit_that_fails_ends_the_run_at_the_one_before(tmp_path, monkeypatch, run, name):
    tiers, expected = run
    trainer = trainer_in(tmp_path / "store", tiers)
    trainer.step(BATCHES[0])

    def fail(*_) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            trainer.step(BATCHES[1])
    assert_broken_off(trainer, caught, expected)


@pytest.mark.parametrize("fault", [short, slow], ids=["short", "slow"])
def test_short_and_slow_calls_change_no_bit(tmp_path, monkeypatch, run, fault):
    tiers, expected = run
    for every in (1, 0):
        disks = [Disk(monkeypatch, name) for name in ("preadv", "pwritev")]
        with trainer_in(tmp_path / str(every), tiers) as trainer:
            for step in range(STEPS):
                for at, disk in enumerate(disks):
                    if every == 0 and fault is short:
                        disk.strike(fault)
                    else:
                        disk.strike(fault, 1 + at + 7 * step)
                trainer.step(BATCHES[step])
        monkeypatch.undo()
        assert committed_in(tmp_path / str(every)) == expected[-1]
