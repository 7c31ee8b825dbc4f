"""Deleting stores, and never anything else."""

import fcntl
import os
from pathlib import Path

import pytest
from stores import committed_store, content, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, remove_store


def striped(base: Path, count: int, commit: bool = True) -> list[Path]:
    folders = [base / f"disk{i}" for i in range(count)]
    store = Store.create(
        folders, run="run", durable={"a": 9 * BLOCK_BYTES}, scratch={"s": BLOCK_BYTES}, stripe_bytes=BLOCK_BYTES
    )
    if commit:
        store.write("a", [content(9 * BLOCK_BYTES, 1)]).wait()
        store.commit({})
    store.close()
    return folders


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("commit", [True, False])
def test_a_store_goes_with_its_folders(tmp_path, count, commit):
    folders = striped(tmp_path / "stores", count, commit)
    (folders[0] / "model").mkdir()
    (folders[0] / "model" / "config.json").write_text("{}")
    inner = folders[0] / "model" / "tokenizer" / "additional_chat_templates"
    inner.mkdir(parents=True)
    (inner / "tools.jinja").write_text("a template")
    (inner.parent / "tokenizer.json").write_text("{}")
    (folders[0] / ".manifest.json.abc0").write_text("half")
    assert remove_store(folders) == []
    assert list((tmp_path / "stores").iterdir()) == []


def test_what_is_not_the_stores_is_left_and_named(tmp_path):
    folders = striped(tmp_path, 2)
    mine = {
        folders[0] / "notes.txt": "mine",
        folders[1] / "slot3.bin": "mine too",
        folders[1] / "model" / "config.json": "not in the first folder",
        folders[0] / "model" / "deep" / "weights": "deeper than an owner puts anything",
    }
    for path, text in mine.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    left = remove_store(folders)
    assert left == [folders[0] / "model", folders[0] / "notes.txt", folders[1] / "model", folders[1] / "slot3.bin"]
    assert {path: path.read_text() for path in mine} == mine
    assert sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()) == sorted(mine)


def test_links_are_not_followed(tmp_path):
    folders = striped(tmp_path / "stores", 1)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "config.json").write_text("kept")
    (folders[0] / "slot1.bin").rename(kept / "slot1.bin")
    (folders[0] / "slot1.bin").symlink_to(kept / "slot1.bin")
    (folders[0] / "model").symlink_to(kept)
    (kept / "tokenizer").mkdir()
    (kept / "tokenizer" / "tokenizer.json").write_text("kept")
    before = tree(kept)
    assert remove_store(folders) == [folders[0] / "model"]
    assert tree(kept) == before
    assert [path.name for path in folders[0].iterdir()] == ["model"]


def test_folders_that_hold_no_store_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("lock", "manifest.json", "scratch.bin", "slot1.bin"):
        (tmp_path / "mine" / name).write_text("{}")
    (tmp_path / "file").write_text("mine")
    store = striped(tmp_path / "stores", 1)
    before = tree(tmp_path)
    for folders, message in [
        ([tmp_path / "mine"], "mine is not the folder of a store, so nothing in it is deleted"),
        ([tmp_path], "is not the folder of a store"),
        ([tmp_path / "file"], "file is not a folder"),
        ([tmp_path / "none"], "none is not a folder"),
        ([tmp_path / "mine", store[0]], "mine is not the folder of a store"),
        ([store[0], store[0]], "are the same folder"),
    ]:
        with pytest.raises(StorageError, match=message):
            remove_store(folders)
        assert tree(tmp_path) == before


def test_all_folders_of_one_store_must_be_given(tmp_path):
    folders, others = striped(tmp_path / "one", 3), striped(tmp_path / "two", 3)
    single = striped(tmp_path / "single", 1)
    before = tree(tmp_path)
    for given, message in [
        (folders[:2], "disk0 is one of the 3 folders of a store, and 2 given"),
        (folders[1:2], "disk1 is one of the 3 folders of a store, and 1 given"),
        ([folders[0], folders[1], others[2]], "one/disk0 and .*two/disk2 belong to different stores"),
        ([folders[0], folders[1], *single], "single/disk0 is not one of several folders"),
    ]:
        with pytest.raises(StorageError, match=message):
            remove_store(given)
        assert tree(tmp_path) == before
    (folders[0] / "manifest.json").write_text("damaged")
    for given, message in [
        (folders[:2], "disk0 is one of the 3 folders of a store, and 2 given"),
        ([*folders[:2], others[2]], "belong to different stores"),
    ]:
        with pytest.raises(StorageError, match=message):
            remove_store(given)
    assert remove_store(folders[::-1]) == []
    assert tree(tmp_path / "two") == {key[4:]: value for key, value in before.items() if key.startswith("two/")}


@pytest.mark.parametrize("damage", ["manifest.json", "slot0.bin", "folder.json"])
def test_a_damaged_store_can_be_deleted(tmp_path, damage):
    folders = striped(tmp_path / "stores", 2)
    for folder in folders:
        if (folder / damage).exists():
            (folder / damage).write_bytes(b"\x00\xff")
    assert remove_store(folders) == []
    assert list((tmp_path / "stores").iterdir()) == []


def test_a_store_in_use_is_not_deleted(tmp_path):
    store = small_store(tmp_path / "run")
    store.commit({})
    before = tree(tmp_path)
    with pytest.raises(StorageError, match=f"run is in use by process {os.getpid()}"):
        remove_store([tmp_path / "run"])
    assert tree(tmp_path) == before
    store.close()
    remove_store([tmp_path / "run"])
    assert not (tmp_path / "run").exists()


def test_an_interrupted_removal_is_taken_up_again(tmp_path):
    folders = striped(tmp_path / "stores", 2)
    for name in ("manifest.json", "slot1.bin", "scratch.bin"):
        (folders[0] / name).unlink()
    (folders[1] / "slot0.bin").unlink()
    with pytest.raises(StorageError, match="no committed store"):
        Store.open(folders)
    assert remove_store(folders) == []
    assert list((tmp_path / "stores").iterdir()) == []


def test_a_lock_file_that_was_replaced_while_it_was_being_locked_holds_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    committed_store(folder)
    remove_store([folder])
    small_store(folder).close()
    real, others = fcntl.flock, []

    def after_another_run_was_faster(descriptor, operation):
        if not others:
            others.append(None)
            remove_store([folder])
            others[0] = small_store(folder)
        return real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_another_run_was_faster)
    with pytest.raises(StorageError, match=f"run is in use by process {os.getpid()}"):
        small_store(folder)
    values = content(BLOCK_BYTES, 1)
    others[0].write("a", [values]).wait()
    others[0].commit({})
    assert others[0].verify() == []
    others[0].close()
    Store.open([folder])[0].close()
