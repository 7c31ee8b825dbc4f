"""Power cut at any moment of a real training run: the store opens at its last snapshot, bit for bit."""

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from architectures import random_batches, small_config
from crash_states import CrashState, PowerCuts, Tree
from recorded_disk import Event, RecordingSystem

from greedysnake import AdamW, Trainer
from greedysnake.engine.opening import MODEL_FOLDER, open_committed
from greedysnake.engine.unit_store import durable_extents
from greedysnake.errors import StorageError
from greedysnake.storage import Store, System, Transfer, aligned_empty

BATCHES = random_batches(7, 2, padding=False)
STRIPE_BYTES = 5 * 4096  # so that a tiny model's chunks lie in all folders
NOT_YET = ("holds no committed store", "is not a folder, so there is no store to read")
NO_PROMISE = ("lock", "scratch.bin")
DIRTY = "has one slot and was being written to"

LIVES: list[tuple[int, dict[str, Any]]] = [
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
    ),
    (1, {"delayed_share": 1.0, "resident_weights": 0.0, "resident_state": 0.0, "snapshot_every": 1}),
    (2, {"delayed_share": 0.0, "boundaries_on_ssd": 0.0, "gradients": "host"}),
]
"""Steps and settings of each life of the run; the second ends without closing."""
STEPS = sum(steps for steps, _ in LIVES)

Content = dict[str, bytes]
"""Weights and state of every chunk."""


class ThroughTheCache(System):
    """The real system calls, without direct I/O, which would have the disk written before it is read."""

    def open(self, path: Path, flags: int) -> int:
        return super().open(path, flags & ~os.O_DIRECT)


@dataclass(frozen=True, kw_only=True)
class Untroubled:
    """A run that nothing happens to.

    Attributes:
        content: what a snapshot after each step holds.
        model: content of the model folder's files by name.
    """

    content: dict[int, Content]
    model: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run whose calls were written down."""

    recording: RecordingSystem
    folders: list[Path]


def make_trainer(folders: Sequence[Path], system: System | None = None, **settings: Any) -> Trainer:
    config = small_config("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    return Trainer(config, folders, chunk_elements=4096, optimizer=AdamW(lr=1e-2), system=system, **settings)


def content_of(store: Store, sizes: Mapping[str, int]) -> Content:
    into = {key: aligned_empty(size) for key, size in sizes.items()}
    Transfer.together([store.read(key, memory) for key, memory in into.items()]).wait()
    return {key: bytes(memory.numpy()) for key, memory in into.items()}


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory) -> Untroubled:
    folder, content = tmp_path_factory.mktemp("untroubled") / "store", {}
    make_trainer([folder]).close()
    for step in range(STEPS + 1):
        if step:
            with Trainer.resume(folder) as trainer:
                trainer.step(BATCHES[step - 1])
        store, skeleton, contents = open_committed([folder])
        content[contents["progress"]["steps_done"]] = content_of(store, durable_extents(skeleton.layouts))
        store.close()
    assert sorted(content) == list(range(STEPS + 1))
    assert len({b"".join(one.values()) for one in content.values()}) == STEPS + 1
    model = {path.name: path.read_bytes() for path in (folder / MODEL_FOLDER).iterdir()}
    assert {"config.json", "buffers.safetensors"} <= model.keys()
    return Untroubled(content=content, model=model)


def recorded_run(
    base: Path,
    count: int,
    system: Callable[[Path], RecordingSystem] = RecordingSystem,
    *,
    lives: Sequence[tuple[int, dict[str, Any]]] = LIVES,
    **settings: Any,
) -> Recorded:
    """The run in ``count`` folders, what it asks of the disk, and what it was told of its commits."""
    recording = system(base)
    folders = [base / "disks" / f"disk{i}" for i in range(count)]
    real_commit = Store.commit

    def commit(self: Store, contents: dict[str, Any]) -> None:
        recording.mark("commit", contents["progress"]["steps_done"])
        real_commit(self, contents)
        recording.mark("committed", contents["progress"]["steps_done"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "commit", commit)
        patch.setattr(Store, "create", functools.partial(Store.create, stripe_bytes=STRIPE_BYTES))
        done = 0
        for life, (steps, changes) in enumerate(lives):
            if life:
                trainer = Trainer.resume(folders, system=recording, **changes)
            else:
                trainer = make_trainer(folders, recording, **{**changes, **settings})
            done = trainer.steps_done
            for batch in BATCHES[done : done + steps]:
                trainer.step(batch)
            if life == 1:
                trainer._store.close()  # as a run that is killed leaves it
            else:
                trainer.close()
    return Recorded(recording=recording, folders=folders)


class Inspector:
    """Opens what a power cut left, as the next start of the machine would.

    Attributes:
        states: how many different ones it has seen.
    """

    def __init__(self, run: Recorded, untroubled: Untroubled, scratch: Path) -> None:
        self._base = run.recording.base
        self._folders = run.folders
        self._untroubled = untroubled
        self._scratch = scratch
        self._there: Tree = {}
        self._found: dict[frozenset[tuple[Path, int | None]], int | str] = {}

    @property
    def states(self) -> int:
        return len(self._found)

    def place(self, tree: Tree, to: Path) -> list[Path]:
        """Put a tree on the real disk; the store's folders in it."""
        for path, content in tree.items():
            here = to / path.relative_to(self._base)
            if content is None:
                here.mkdir(parents=True, exist_ok=True)
            else:
                here.write_bytes(content)
        return [to / folder.relative_to(self._base) for folder in self._folders]

    def found(self, tree: Tree) -> int | str:
        """After which step the store is that it holds, bit for bit, or what is said about it."""
        parts = frozenset((path, hash(content)) for path, content in tree.items() if path.name not in NO_PROMISE)
        if parts not in self._found:
            self._found[parts] = self._open(tree)
        return self._found[parts]

    def _open(self, tree: Tree) -> int | str:
        for path in [path for path in self._there if path not in tree]:
            here = self._scratch / path.relative_to(self._base)
            if here.is_file():
                here.unlink()
        for path in sorted((p for p in self._there if p not in tree and self._there[p] is None), reverse=True):
            shutil.rmtree(self._scratch / path.relative_to(self._base), ignore_errors=True)
        changed = {path: content for path, content in tree.items() if self._there.get(path, b"-") != content}
        folders = self.place(changed, self._scratch)
        self._there = {**tree, **{path: b"?" for path in tree if path.name == "lock"}}
        try:
            store, contents = Store.open(folders, system=ThroughTheCache())
        except StorageError as error:
            assert str(self._scratch) in str(error)
            return str(error)
        try:
            steps = contents["progress"]["steps_done"]
            if damages := store.verify():
                return f"step {steps} with damage: {damages[0]}"
            expected = self._untroubled.content[steps]
            if content_of(store, {key: len(value) for key, value in expected.items()}) != expected:
                return f"step {steps} with other content"
        finally:
            store.close()
        first = self._folders[0] / MODEL_FOLDER
        model = {path.name: content for path, content in tree.items() if path.parent == first}
        return steps if model == self._untroubled.model else f"step {steps} without its model: {sorted(model)}"


def problem_with(state: CrashState, found: int | str, *, one_slot: bool) -> str | None:
    """Why a state should not have been found like this."""
    if found in (state.last, state.under_way) and found is not None:
        return None
    if isinstance(found, str):
        if state.last is None and any(words in found for words in NOT_YET):
            return None
        if one_slot and DIRTY in found and not state.quiet:
            return None
    return f"event {state.moment}, committed {state.last}, under way {state.under_way}: found {found}"


def problems_of(
    run: Recorded,
    untroubled: Untroubled,
    scratch: Path,
    *,
    events: Sequence[Event] | None = None,
    chances: int = 2,
    most: int | None = None,
    one_slot: bool = False,
    last: int | None = None,
    seen: Callable[[CrashState, int | str], None] = lambda state, found: None,
) -> tuple[list[str], int]:
    """What is wrong with the states that power cuts leave, and how many different states there are."""
    inspector, problems = Inspector(run, untroubled, scratch), []
    cuts = PowerCuts(run.recording, irrelevant=NO_PROMISE, seed=len(run.folders), chances=chances)
    for state in cuts.states(run.recording.events if events is None else events, last=last):
        found = inspector.found(state.tree)
        problem = problem_with(state, found, one_slot=one_slot)
        if problem is not None:
            problems.append(problem)
            if most is not None and len(problems) >= most:
                break
        seen(state, found)
    return problems, inspector.states
