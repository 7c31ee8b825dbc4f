"""Power cut at any moment of a real training run: the store opens at its last snapshot, bit for bit.

The run's system calls are written down (recorded_disk.py); crash_states.py makes of them what a power cut may leave
after each call, the real store opens it, and every bit is compared with a run that nothing happened to.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from crash_states import CrashState, PowerCuts, Tree
from recorded_disk import Event, Operation, RecordingSystem
from recorded_runs import (
    BATCHES,
    NO_PROMISE,
    STEPS,
    Inspector,
    Lives,
    Recorded,
    Untroubled,
    committed_in,
    recorded_run,
    untroubled_run,
)

from greedysnake import Trainer
from greedysnake.storage import Store

NOTHING_YET = ("holds no committed store", "is not a folder, so there is no store to read")
NOTHING_ANY_MORE = "has one slot and was being written to"

LIVES: Lives = [
    (
        4,
        {
            "delayed_share": 0.5,
            "resident_weights": 0.5,
            "resident_state": 0.5,
            "snapshot_every": 2,
            "boundaries_on_ssd": 1.0,
            "gradients": "ssd",
        },
        True,
    ),
    (2, {"delayed_share": 1.0, "resident_weights": 0.0, "resident_state": 0.0, "snapshot_every": 1}, False),
    (2, {"delayed_share": 0.0, "boundaries_on_ssd": 0.0, "gradients": "host"}, True),
]
COMMITS = {0, 2, 4, 5, 6, 7}
"""Steps that have a snapshot: 4 and 7 when the run is closed; the life that is killed has not committed its last."""


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory) -> Untroubled:
    return untroubled_run(tmp_path_factory.mktemp("untroubled") / "store")


@pytest.fixture
def scratch(tmp_path) -> Iterator[Path]:
    """Where crash states are put: in memory if that is possible."""
    memory = Path(f"/dev/shm/greedysnake-power-{os.getpid()}")
    if not os.access(memory.parent, os.W_OK):
        yield tmp_path
        return
    memory.mkdir()
    yield memory
    shutil.rmtree(memory)


def folders_in(base: Path, count: int) -> list[Path]:
    return [base / "disks" / f"disk{i}" for i in range(count)]


def problem_with(state: CrashState, found: int | str, *, one_slot: bool) -> str | None:
    """Why a store should not have been found like this."""
    if isinstance(found, int) and found in (state.last, state.under_way):
        return None
    if isinstance(found, str):
        if state.last is None and any(words in found for words in NOTHING_YET):
            return None
        if one_slot and NOTHING_ANY_MORE in found and not state.quiet:
            return None
    return f"event {state.moment}, committed {state.last}, being committed {state.under_way}: found {found}"


def problems_of(
    run: Recorded,
    inspector: Inspector,
    *,
    events: Sequence[Event] | None = None,
    chances: int = 4,
    last: int | None = None,
    one_slot: bool = False,
    seen: Callable[[CrashState, int | str], None] = lambda state, found: None,
) -> Iterator[str]:
    """What is wrong with the states that power cuts leave."""
    cuts = PowerCuts(run.recording, irrelevant=NO_PROMISE, seed=len(run.folders), chances=chances)
    for state in cuts.states(run.recording.events if events is None else events, last=last):
        found = inspector.found(state.tree)
        seen(state, found)
        problem = problem_with(state, found, one_slot=one_slot)
        if problem is not None:
            yield problem


@pytest.mark.parametrize("count", [1, 2])
def test_power_cut_at_any_moment_leaves_the_last_snapshot(tmp_path, scratch, untroubled, count):
    run = recorded_run(RecordingSystem(tmp_path), folders_in(tmp_path, count), LIVES)
    inspector = Inspector(run, untroubled, scratch / "state")
    draw, met = Random(count), Counter[int | str]()
    examples: dict[int | str, list[Tree]] = {}

    def seen(state: CrashState, found: int | str) -> None:
        """Keep a few of each kind, each as likely as any other."""
        kind = found if isinstance(found, int) else "nothing"
        met[kind] += 1
        kept = examples.setdefault(kind, [state.tree])
        if len(kept) < 8:
            kept.append(state.tree)
        elif (place := draw.randrange(met[kind])) < 8:
            kept[place] = state.tree

    assert list(problems_of(run, inspector, seen=seen)) == []
    print(f"{inspector.states:,} different states of {count} folders")
    assert inspector.states > 1000
    assert examples.keys() == COMMITS | {"nothing"}
    for number, tree in enumerate(examples.pop("nothing")):  # a new run can begin there
        Store.create(inspector.place(tree, scratch / f"new{number}"), run="", durable={"a": 4096}, scratch={}).close()
    for steps, trees in examples.items():  # and the old one goes on, bitwise as if nothing had happened
        folders = inspector.place(trees[-1], scratch / f"on{steps}")
        with Trainer.resume(folders, delayed_share=0.5) as trainer:
            assert trainer.steps_done == steps
            for batch in BATCHES[steps:]:
                trainer.step(batch)
        assert committed_in(folders) == (STEPS, untroubled.content[STEPS])


def test_power_cut_while_a_part_is_frozen(tmp_path, scratch):
    """What is written once is there with the first commit, and stays."""
    frozen = {"freeze": ["model.embed_tokens.*", "model.layers.0.*"]}
    expected = untroubled_run(tmp_path / "untroubled" / "store", **frozen)
    first = tmp_path / "first"
    first.mkdir()
    lives: Lives = [(2, {"delayed_share": 0.5, "snapshot_every": 1}, False), (1, {"delayed_share": 1.0}, True)]
    run = recorded_run(RecordingSystem(first), folders_in(first, 2), lives, **frozen)
    assert any(event.operation is not None and is_fixed(event.operation) for event in run.recording.events)
    inspector, found_at = Inspector(run, expected, scratch / "state"), set[int | str]()

    def seen(state: CrashState, found: int | str) -> None:
        found_at.add(found if isinstance(found, int) else "nothing")

    assert list(problems_of(run, inspector, chances=2, seen=seen)) == []
    assert found_at == {"nothing", 0, 1, 2}
    forgetful = [event for event in run.recording.events if not (event.operation and flushes_fixed(event.operation))]
    assert list(problems_of(run, inspector, events=forgetful, chances=2)) != []


def is_fixed(operation: Operation) -> bool:
    return operation.kind == "write" and operation.path.name == "fixed.bin"


def flushes_fixed(operation: Operation) -> bool:
    return operation.kind == "flush" and operation.path.name == "fixed.bin"


def test_power_cut_after_a_power_cut(tmp_path, scratch, untroubled):
    first = tmp_path / "first"
    first.mkdir()
    run = recorded_run(RecordingSystem(first), folders_in(first, 2), [(3, LIVES[0][1], False)])
    cuts = PowerCuts(run.recording, irrelevant=NO_PROMISE, seed=0, chances=2)
    during = [state for state in cuts.states(run.recording.events) if (state.last, state.under_way) == (0, 2)]
    inspector = Inspector(run, untroubled, scratch / "state")
    for state in during[:: len(during) // 3]:  # a commit that came to nothing, or just did not
        base = tmp_path / f"after{state.moment}"
        folders, steps = inspector.place(state.tree, base), inspector.found(state.tree)
        assert steps in (0, 2)
        again = recorded_run(RecordingSystem(base), folders, [(2, {"delayed_share": 1.0}, True)], resume=True)
        second = Inspector(again, untroubled, scratch / f"again{state.moment}")
        assert list(problems_of(again, second, chances=1, last=steps)) == []
        assert second.states > 50


def test_with_one_slot_a_power_cut_never_leaves_what_is_believed_and_wrong(tmp_path, scratch, untroubled):
    lives: Lives = [(2, {"snapshot_every": 2}, True), (1, {"delayed_share": 0.5}, True)]
    run = recorded_run(RecordingSystem(tmp_path), folders_in(tmp_path, 1), lives, second_slot=False)
    inspector, found_at = Inspector(run, untroubled, scratch / "state"), set()

    def seen(state: CrashState, found: int | str) -> None:
        found_at.add(NOTHING_ANY_MORE if NOTHING_ANY_MORE in str(found) else found)

    assert list(problems_of(run, inspector, chances=4, one_slot=True, seen=seen)) == []
    assert found_at > {0, 2, 3, NOTHING_ANY_MORE}


# The check itself: a store that forgets a flush is found out


def is_slot(operation: Operation) -> bool:
    return operation.path.name.startswith("slot")


FORGOTTEN: dict[str, Callable[[Operation], bool]] = {
    "all flushes": lambda operation: True,
    "flushes of weights and state": is_slot,
    "flushes of the second folder's weights and state": lambda o: is_slot(o) and o.path.parent.name == "disk1",
    "the flush of the manifest before it is renamed": lambda o: "manifest" in o.path.name,
    "flushes of folders": lambda o: o.file is None,
    "flushes of the storage folder once it is committed": lambda o: o.file is None and o.path.name == "disk0",
    "flushes of the second folder": lambda o: o.file is None and o.path.name == "disk1",
    "the flush of the parent folder": lambda o: o.file is None and o.path.name == "disks",
    "flushes of the model's files": lambda o: o.path.parent.name == "model",
    "the flush of the model's folder": lambda o: o.file is None and o.path.name == "model",
    "the flush of the second folder's identity": lambda o: "folder.json" in o.path.name and "disk1" in str(o.path),
}


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory) -> Recorded:
    base = tmp_path_factory.mktemp("recorded")
    return recorded_run(RecordingSystem(base), folders_in(base, 2), LIVES[:1])


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_forgotten_flush_is_found_out(scratch, untroubled, two_folders, forgotten):
    events = [
        event
        for event in two_folders.recording.events
        if not (event.operation and event.operation.kind == "flush" and FORGOTTEN[forgotten](event.operation))
    ]
    assert len(events) < len(two_folders.recording.events)
    inspector = Inspector(two_folders, untroubled, scratch)
    assert next(problems_of(two_folders, inspector, events=events, chances=2), None) is not None


def test_a_flush_that_comes_after_the_rename_is_found_out(scratch, untroubled, two_folders):
    events, late = [], []
    for event in two_folders.recording.events:
        operation = event.operation
        if operation is not None and operation.kind == "flush" and is_slot(operation):
            late.append(event)
        else:
            events.append(event)
            if operation is not None and operation.kind == "rename" and event.phase == "end":
                events += late
                late = []
    inspector = Inspector(two_folders, untroubled, scratch)
    assert next(problems_of(two_folders, inspector, events=events, chances=2), None) is not None


def test_a_system_that_does_not_flush_is_found_out(tmp_path, scratch, untroubled):
    class Forgetful(RecordingSystem):
        def fsync(self, descriptor: int) -> None:
            pass

    run = recorded_run(Forgetful(tmp_path), folders_in(tmp_path, 1), [(2, {}, True)])
    assert next(problems_of(run, Inspector(run, untroubled, scratch), chances=2), None) is not None


# A real file system, shut down


def test_a_real_file_system_whose_power_is_cut(tmp_path):
    script = Path(__file__).parents[1] / "scripts" / "power_cut.py"
    result = subprocess.run(
        [sys.executable, script, tmp_path / "runs", "--cuts", "4", "--seed", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    )
    if "a file system cannot be made here" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bitwise those of an untouched run" in result.stdout
