"""Every fault at every kind of operation: one clear error, no thread left, the last snapshot whole, and on it goes.

The faults come from underneath the store, in place of its system calls. fault_matrix.py holds the list.
"""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import pytest
from architectures import random_batches, small_config
from fault_matrix import CELLS, HARMLESS, OPERATIONS, Operation, StruckSystem, table
from faulty_system import fails
from recorded_runs import Content, committed_in

from greedysnake import AdamW, Trainer
from greedysnake.errors import StorageError
from greedysnake.plan.activations import BatchShape

STEPS = 3
BATCHES = random_batches(STEPS, 2, padding=False)
SHAPE = BatchShape(micro_batches=2, rows=2, tokens=12)
SETTINGS = {
    "host": {"delayed_share": 0.5},
    "ssd": {"delayed_share": 0.5, "boundaries_on_ssd": 1.0, "gradients": "ssd"},
}


def new_run(folder: Path, tiers: str = "ssd", system: StruckSystem | None = None) -> Trainer:
    config = small_config("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    optimizer = AdamW(lr=1e-2)
    return Trainer(
        config, folder, chunk_elements=4096, optimizer=optimizer, batch=SHAPE, system=system, **SETTINGS[tiers]
    )


def resumed(folder: Path, system: StruckSystem | None = None) -> Trainer:
    trainer = Trainer.resume(folder, system=system)
    try:
        trainer.reserve(SHAPE)
    except StorageError:
        with contextlib.suppress(StorageError):
            trainer.close()
        raise
    return trainer


@dataclass(frozen=True, kw_only=True)
class Untroubled:
    """What a run comes to without faults.

    Attributes:
        content: what a snapshot after each step holds.
        after_one: a copy of the storage after one step, by tiers.
        counts: how often each operation happens at its time.
    """

    content: dict[int, Content] = field(repr=False)
    after_one: dict[str, Path]
    counts: dict[Operation, int]


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory) -> Untroubled:
    base = tmp_path_factory.mktemp("untroubled")
    content, after_one, counts = {}, {}, {}
    for tiers in SETTINGS:
        folder, system = base / tiers / "store", StruckSystem()
        folder.parent.mkdir()
        trainer = new_run(folder, tiers, system)
        system.when = "closing"
        trainer.close()
        for step in range(STEPS + 1):
            if step:
                with resumed(folder) as trainer:
                    trainer.step(BATCHES[step - 1])
            steps, found = committed_in([folder])
            assert (steps, content.setdefault(step, found)) == (step, found)
            if step == 1:
                after_one[tiers] = shutil.copytree(folder, base / f"{tiers} after one")
        system.when = "resume"
        trainer = resumed(shutil.copytree(after_one[tiers], base / f"{tiers} again" / "store"), system)
        system.when = "first step"
        trainer.step(BATCHES[1])
        system.when = "step"
        trainer.step(BATCHES[2])
        system.when = "closing"
        trainer.close()
        counts |= system.counts
    return Untroubled(content=content, after_one=after_one, counts=counts)


def threads_of_a_run() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("greedysnake")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = {thread.name for thread in threading.enumerate()}
    yield
    assert {thread.name for thread in threading.enumerate()} <= before


def assert_clear(error: StorageError, folder: Path, operation: Operation, fault: str) -> None:
    """It says where, what and why; where all calls fail from then on, another may be told of first."""
    message = str(error)
    assert type(error) is StorageError
    assert str(folder) in message
    assert "damaged" not in message
    assert "\n" not in message or operation.name == "check weights and state"
    if fault in ("ENOENT", "ESTALE"):
        assert any(words in message for words in (operation.says, "cannot ", "is not a folder"))
    else:
        assert operation.says in message
    expected = os.strerror(getattr(errno, fault))
    if fault == "ENOENT":
        assert any(words in message for words in (expected, "is missing", "is not a folder"))
    else:
        assert expected in message


def assert_goes_on(folder: Path, untroubled: Untroubled, steps: int) -> None:
    """What is there is the snapshot after so many steps, and the run goes on from it, bitwise untroubled."""
    assert committed_in([folder]) == (steps, untroubled.content[steps])
    with resumed(folder) as trainer:
        assert trainer.steps_done == steps
        for batch in BATCHES[steps:]:
            trainer.step(batch)
    assert committed_in([folder]) == (STEPS, untroubled.content[STEPS])
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def assert_broken_off(trainer: Trainer) -> None:
    """No further step; closing works."""
    for action in (lambda: trainer.step(BATCHES[2]), lambda: trainer.evaluate(BATCHES[2])):
        with pytest.raises(RuntimeError, match="broken off"):
            action()
    trainer.close()
    trainer.close()
    assert threads_of_a_run() == []


@pytest.mark.parametrize(("operation", "fault"), CELLS, ids=[f"{o.when}: {o.name}-{f}" for o, f in CELLS])
def test_an_error_leaves_the_last_snapshot(tmp_path, untroubled, operation, fault):
    count = untroubled.counts[operation]
    draw = crc32(f"{operation.name} {fault}".encode())
    system, at, folder = StruckSystem(), 1 + draw % count, tmp_path / "store"
    system.when = operation.when
    tiers = "ssd" if "scratch" in operation.path or draw % 2 else "host"
    if operation.when == "new":
        system.strike_at(operation, at, fault)
        with pytest.raises(StorageError) as caught:
            new_run(folder, tiers, system)
        assert threads_of_a_run() == []
        system.heal()
        new_run(folder, tiers, system).close()
        assert_clear(caught.value, folder, operation, fault)
        assert_goes_on(folder, untroubled, 0)
        return
    shutil.copytree(untroubled.after_one[tiers], folder)
    if operation.when == "resume":
        system.strike_at(operation, at, fault)
        with pytest.raises(StorageError) as caught:
            resumed(folder, system)
        assert threads_of_a_run() == []
        system.heal()
        assert_clear(caught.value, folder, operation, fault)
        assert_goes_on(folder, untroubled, 1)
        return
    trainer = resumed(folder, system)
    trainer.step(BATCHES[1])
    system.strike_at(operation, at, fault)
    with pytest.raises(StorageError) as caught:
        trainer.step(BATCHES[2])
    assert_clear(caught.value, folder, operation, fault)
    assert "while carrying out operation" in caught.value.__notes__[0]
    assert_broken_off(trainer)
    system.heal()
    after_rename = operation.name == "flush the folder"
    assert_goes_on(folder, untroubled, trainer.last_snapshot + after_rename)


def in_the_middle(folder: Path, untroubled: Untroubled, tiers: str) -> tuple[Trainer, StruckSystem]:
    """A run after two steps, of which the second is not committed yet."""
    system = StruckSystem()
    trainer = resumed(shutil.copytree(untroubled.after_one[tiers], folder), system)
    trainer.step(BATCHES[1])
    return trainer, system


@pytest.mark.parametrize("tiers", SETTINGS)
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("action", [lambda trainer: trainer.step(BATCHES[2]), Trainer.close], ids=["step", "close"])
def test_all_calls_fail_at_once(tmp_path, untroubled, tiers, call, action):
    trainer, system = in_the_middle(tmp_path / "store", untroubled, tiers)
    system.strike(call, fails(errno.EIO))
    with pytest.raises(StorageError, match=f"cannot (read|write) .* of {tmp_path}/.*: Input/output error"):
        action(trainer)
    assert_broken_off(trainer)
    assert_goes_on(tmp_path / "store", untroubled, 1)


@pytest.mark.parametrize("tiers", SETTINGS)
def test_a_file_that_was_cut_off_is_named(tmp_path, untroubled, tiers):
    trainer, system = in_the_middle(tmp_path / "store", untroubled, tiers)
    system.strike("preadv", lambda real, *given: 0, "slot0", after=3)
    with pytest.raises(StorageError, match=rf"cannot read {tmp_path}/store/slot0\.bin at byte .*: the file ends there"):
        trainer.step(BATCHES[2])
    assert_broken_off(trainer)
    assert_goes_on(tmp_path / "store", untroubled, trainer.last_snapshot)


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_is_harmless_changes_no_bit(tmp_path, untroubled, fault):
    met = set()
    for tiers in SETTINGS:
        system, folder = StruckSystem(fault), tmp_path / tiers / "store"
        folder.parent.mkdir()
        with new_run(folder, tiers, system) as trainer:
            met |= system.counts.keys()
            trainer.step(BATCHES[0])
        system.when = "resume"
        with resumed(folder, system) as trainer:
            met |= system.counts.keys()
            for batch in BATCHES[1:]:
                system.when = "step"
                trainer.step(batch)
            met |= system.counts.keys()
        assert committed_in([folder]) == (STEPS, untroubled.content[STEPS])
    assert met == set(OPERATIONS)


def test_the_documented_table_is_this_one():
    assert table() in (Path(__file__).parents[1] / "docs" / "reliability.md").read_text()
