"""A small training run written down call by call, and what is found of it after a power cut."""

import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from architectures import random_batches, small_config
from crash_states import Tree
from recorded_disk import RecordingSystem

from greedysnake import AdamW, Trainer
from greedysnake.engine.opening import MODEL_FOLDER, open_committed
from greedysnake.engine.unit_store import durable_extents, fixed_extents
from greedysnake.errors import StorageError
from greedysnake.storage import Store, System, Transfer, aligned_empty

STEPS = 7
BATCHES = random_batches(STEPS, 2, padding=False)
STRIPE_BYTES = 5 * 4096
"""So little that a tiny model's chunks lie in all folders."""

NO_PROMISE = ("lock", "scratch.bin")
"""Files whose bytes nobody reads after a crash."""

Lives = Sequence[tuple[int, Mapping[str, Any], bool]]
"""Of each life of a run: its steps, its settings, and whether it is closed or killed."""

Content = dict[str, bytes]
"""Weights and state of every chunk."""


@dataclass(frozen=True, kw_only=True)
class Untroubled:
    """A run that nothing happens to.

    Attributes:
        content: what a snapshot after each step holds.
        model: content of the files beside the weights, by name.
    """

    content: dict[int, Content] = field(repr=False)
    model: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run whose system calls were written down, and its storage folders."""

    recording: RecordingSystem
    folders: list[Path]


class ThroughTheCache(System):
    """The real system calls, without direct I/O, for which a disk would have to be written before it is read."""

    def open(self, path: Path, flags: int) -> int:
        return super().open(path, flags & ~os.O_DIRECT)


def make_trainer(folders: Sequence[Path], system: System | None = None, **settings: Any) -> Trainer:
    config = small_config("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    return Trainer(config, folders, chunk_elements=4096, optimizer=AdamW(lr=1e-2), system=system, **settings)


def content_of(store: Store, sizes: Mapping[str, int]) -> Content:
    """What a store's extents hold."""
    into = {key: aligned_empty(size) for key, size in sizes.items()}
    Transfer.together([store.read(key, memory) for key, memory in into.items()]).wait()
    return {key: bytes(memory.numpy()) for key, memory in into.items()}


def committed_in(folders: Sequence[Path]) -> tuple[int, Content]:
    """Steps and content of the last commit."""
    store, skeleton, contents = open_committed(folders)
    extents = durable_extents(skeleton.layouts) | fixed_extents(skeleton.layouts)
    try:
        return contents["progress"]["steps_done"], content_of(store, extents)
    finally:
        store.close()


def untroubled_run(folder: Path, **settings: Any) -> Untroubled:
    """A run that is closed after every step."""
    content = {}
    make_trainer([folder], **settings).close()
    for step in range(STEPS + 1):
        if step:
            with Trainer.resume(folder) as trainer:
                trainer.step(BATCHES[step - 1])
        steps, content[step] = committed_in([folder])
        assert steps == step
    assert len({b"".join(one.values()) for one in content.values()}) == STEPS + 1
    model = {path.name: path.read_bytes() for path in (folder / MODEL_FOLDER).iterdir()}
    assert {"config.json", "buffers.safetensors"} <= model.keys()
    return Untroubled(content=content, model=model)


@contextmanager
def _noted_commits(recording: RecordingSystem) -> Iterator[None]:
    """Write down what the owner of a store asks and is told of commits."""
    real = Store.commit

    def commit(self: Store, contents: dict[str, Any]) -> None:
        recording.mark("commit", contents["progress"]["steps_done"])
        real(self, contents)
        recording.mark("committed", contents["progress"]["steps_done"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "commit", commit)
        patch.setattr(Store, "create", functools.partial(Store.create, stripe_bytes=STRIPE_BYTES))
        yield


def recorded_run(
    recording: RecordingSystem, folders: Sequence[Path], lives: Lives, *, resume: bool = False, **settings: Any
) -> Recorded:
    """A run, or with ``resume`` the rest of one, and what it asks of the disk."""
    with _noted_commits(recording):
        for life, (steps, changes, closes) in enumerate(lives):
            if life or resume:
                trainer = Trainer.resume(folders, system=recording, **changes)
            else:
                trainer = make_trainer(folders, recording, **{**changes, **settings})
            for batch in BATCHES[trainer.steps_done : trainer.steps_done + steps]:
                trainer.step(batch)
            if closes:
                trainer.close()
            else:
                trainer._store.close()  # as the kernel does when a process is killed
    return Recorded(recording=recording, folders=list(folders))


class Inspector:
    """Opens what a power cut left, as the next start of the machine would.

    Args:
        run: what was going on.
        untroubled: what it should have come to.
        scratch: folder to put the states into, one after the other.
    """

    def __init__(self, run: Recorded, untroubled: Untroubled, scratch: Path) -> None:
        self._base = run.recording.base
        self._folders = run.folders
        self._untroubled = untroubled
        self._scratch = scratch
        self._there: Tree = {}
        self._found: dict[frozenset[tuple[Path, int]], int | str] = {}

    @property
    def states(self) -> int:
        """How many different ones it has opened."""
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
        """After which step the store is that a tree holds, bit for bit; or what is wrong, or said to be."""
        parts = frozenset((path, hash(content)) for path, content in tree.items() if path.name not in NO_PROMISE)
        if parts not in self._found:
            self._found[parts] = self._open(tree)
        return self._found[parts]

    def _open(self, tree: Tree) -> int | str:
        for path in sorted(self._there.keys() - tree.keys(), reverse=True):
            here = self._scratch / path.relative_to(self._base)
            shutil.rmtree(here) if here.is_dir() else here.unlink()
        changed = {path: content for path, content in tree.items() if self._there.get(path, b"-") != content}
        folders = self.place(changed, self._scratch)
        self._there = {path: b"-" if path.name == "lock" else content for path, content in tree.items()}
        try:
            store, contents = Store.open(folders, system=ThroughTheCache())
        except StorageError as error:
            return str(error)
        with closing(store):
            steps = contents["progress"]["steps_done"]
            if damages := store.verify():
                return f"step {steps} with damage: {damages[0]}"
            expected = self._untroubled.content[steps]
            if content_of(store, {key: len(value) for key, value in expected.items()}) != expected:
                return f"step {steps} with other content"
        model = {path.name: tree[path] for path in tree if path.parent == self._folders[0] / MODEL_FOLDER}
        return steps if model == self._untroubled.model else f"step {steps} with the model files {sorted(model)}"
