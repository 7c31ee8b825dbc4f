"""A bit that changed on a disk, at 200 places: found when a run is verified or goes on, and named."""

import functools
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest
from recorded_runs import BATCHES, STRIPE_BYTES, Content, committed_in, make_trainer

from greedysnake import Trainer
from greedysnake.engine.opening import MODEL_FOLDER, open_committed
from greedysnake.errors import StorageError
from greedysnake.storage import Store, aligned_empty

IN_SLOTS, IN_MANIFEST, IN_IDENTITIES, IN_MODEL = 120, 30, 25, 25
"""Places in each kind of file."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[list[Path], Content]:
    """The folders of a run whose snapshot lies in both slots of both, and what it holds."""
    base = tmp_path_factory.mktemp("run")
    folders = [base / "disk0", base / "disk1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "create", functools.partial(Store.create, stripe_bytes=STRIPE_BYTES))
        trainer = make_trainer(folders, delayed_share=0.5)
    with trainer:
        trainer.step(BATCHES[0])
    steps, content = committed_in(folders)
    assert steps == 1
    store, contents = Store.open(folders, writable=True)
    for key in list(content)[::2]:  # as a step leaves it that does not write all
        memory = aligned_empty(len(content[key]))
        store.read(key, memory).wait()
        store.write(key, [memory]).wait()
    store.commit(contents)
    store.close()
    return folders, content


@contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    """A bit of a file changed, and changed back."""

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))

    flip()
    yield
    flip()


def refusal(folders: list[Path]) -> str:
    """What a run says that shall go on, and does not."""
    with pytest.raises(StorageError) as caught:
        Trainer.resume(folders)
    return str(caught.value)


def places_of(folders: list[Path]) -> list[tuple[Path, int, int, str]]:
    """File, offset, length and chunk of everything that is committed."""
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    with closing(Store.open(folders)[0]) as store:
        geometry = store.geometry
    start, places = 0, []
    for (key, size), slot in zip(manifest["extents"], manifest["slots"], strict=True):
        for piece in geometry.pieces(start, size):
            places.append((folders[piece.folder] / f"slot{slot}.bin", piece.offset, piece.length, key))
        start += size
    return places


def test_in_weights_and_state(run):
    folders, content = run
    places, draw = places_of(folders), Random(1)
    assert {(path.parent, path.name) for path, *_ in places} == {
        (folder, f"slot{slot}.bin") for folder in folders for slot in (0, 1)
    }
    for number in range(IN_SLOTS):
        path, offset, length, key = places[number % len(places)]
        at = offset + draw.randrange(length)
        with flipped(path, at, draw.randrange(8)):
            store, _, _ = open_committed(folders)
            with closing(store):
                (damage,) = store.verify()
            assert (damage.path, damage.key) == (path, key)
            assert damage.offset <= at < damage.offset + damage.length
            message = refusal(folders)
            assert f"{path}, bytes {damage.offset:,} to " in message
            assert f"part of {key}: its checksum is" in message
            assert "is damaged, so it is not used" in message
    assert committed_in(folders) == (1, content)


def assert_named(folders: list[Path], paths: list[Path], count: int, seed: int) -> None:
    """A flipped bit of small files is found before anything is used, and the file named."""
    draw = Random(seed)
    for number in range(count):
        path = paths[number % len(paths)]
        with flipped(path, draw.randrange(path.stat().st_size), draw.randrange(8)):
            for message in (refusal(folders), refusal_to_open(folders)):
                assert str(path) in message


def refusal_to_open(folders: list[Path]) -> str:
    """What verify and export say."""
    with pytest.raises(StorageError) as caught:
        open_committed(folders)
    return str(caught.value)


def test_in_the_manifest(run):
    folders, content = run
    assert_named(folders, [folders[0] / "manifest.json"], IN_MANIFEST, 2)
    assert committed_in(folders) == (1, content)


def test_in_the_identities_of_folders(run):
    folders, content = run
    assert_named(folders, [folder / "folder.json" for folder in folders], IN_IDENTITIES, 3)
    assert committed_in(folders) == (1, content)


def test_in_the_models_files(run):
    folders, content = run
    paths = sorted((folders[0] / MODEL_FOLDER).iterdir())
    assert {"config.json", "generation_config.json", "buffers.safetensors"} <= {path.name for path in paths}
    assert_named(folders, paths, IN_MODEL, 4)
    assert committed_in(folders) == (1, content)
    with Trainer.resume(folders) as trainer:
        trainer.step(BATCHES[1])
