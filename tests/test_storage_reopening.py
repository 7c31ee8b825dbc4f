"""Stores opened again, to go on or to read, with one slot or two."""

import subprocess
import sys
from pathlib import Path

import pytest
from stores import committed_store, content, read, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store

ROOT = Path(__file__).parents[1]


# One slot


def test_a_store_of_one_slot_takes_half_the_disk_and_keeps_what_it_commits(tmp_path):
    values = committed_store(tmp_path, {"step": 1}, slots=1)
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == ["scratch.bin", "slot0.bin"]
    for step in (2, 3):
        store, contents = Store.open([tmp_path], writable=True)
        assert contents == {"step": step - 1}
        assert (read(store, "a", BLOCK_BYTES), read(store, "b", 3 * BLOCK_BYTES)) == values
        value = content(BLOCK_BYTES, step)
        for _ in range(2):
            store.write("a", [value]).wait()
        values = bytes(value.numpy()), values[1]
        store.commit({"step": step})
        assert store.verify() == []
        store.close()


def test_a_store_of_one_slot_cannot_take_anything_back(tmp_path):
    store = small_store(tmp_path, slots=1)
    for step in range(2):
        store.write("a", [content(BLOCK_BYTES, step)]).wait()
        with pytest.raises(StorageError) as caught:
            store.revert(["b", "a"])
        assert str(caught.value) == (
            f"the store in {tmp_path} has one slot, so what was written to 'a' since the last commit cannot be taken "
            "back"
        )
        store.commit({"step": step})
        store.revert(["a", "b"])
        assert read(store, "a", BLOCK_BYTES) == bytes(content(BLOCK_BYTES, step).numpy())
    store.close()


ONE_SLOT_WRITER = """
import os, signal, sys
from pathlib import Path
from greedysnake.storage import Store, aligned_empty
store, _ = Store.open([Path(sys.argv[1])], writable=True)
if sys.argv[2] == "written":
    store.write("a", [aligned_empty(4096)]).wait()
if sys.argv[2] == "committed":
    store.write("a", [aligned_empty(4096)]).wait()
    store.commit({"step": 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("when", "step"), [("opened", 1), ("written", None), ("committed", 2)])
def test_a_store_of_one_slot_whose_process_was_killed(tmp_path, when, step):
    committed_store(tmp_path, {"step": 1}, slots=1)
    subprocess.run([sys.executable, "-c", ONE_SLOT_WRITER, str(tmp_path), when], cwd=ROOT, timeout=60)
    for writable in (False, True):
        if step is None:
            with pytest.raises(StorageError) as caught:
                Store.open([tmp_path], writable=writable)
            assert f"the store in {tmp_path} has one slot and was being written to when its run ended" in str(
                caught.value
            )
        else:
            store, contents = Store.open([tmp_path], writable=writable)
            assert (contents, store.verify()) == ({"step": step}, [])
            store.close()
    with pytest.raises(StorageError, match="already holds the store"):
        small_store(tmp_path)


def test_scratch_does_not_make_a_store_of_one_slot_dirty(tmp_path):
    committed_store(tmp_path, {"step": 1}, slots=1)
    store, _ = Store.open([tmp_path], writable=True)
    store.reserve_scratch({"s": BLOCK_BYTES})
    store.write("s", [content(BLOCK_BYTES, 1)]).wait()
    store.revert(["a", "b"])  # nothing was written to them
    store.close()
    store, contents = Store.open([tmp_path])
    assert (contents, store.verify()) == ({"step": 1}, [])
    store.close()


# Opened to read or to go on


def test_a_store_opened_for_reading_takes_no_writes(tmp_path):
    committed_store(tmp_path)
    store, _ = Store.open([tmp_path])
    for action in (
        lambda: store.write("a", [content(BLOCK_BYTES, 1)]),
        lambda: store.commit({}),
        lambda: store.reserve_scratch({}),
    ):
        with pytest.raises(ValueError, match="opened for reading"):
            action()
    store.close()


def test_a_store_whose_holes_were_left_out_by_a_copy_reserves_its_disk_again(tmp_path):
    size = 64 * BLOCK_BYTES
    small_store(tmp_path / "run", durable={"a": size}).close()
    store = small_store(tmp_path / "run", durable={"a": size})
    store.commit({})
    store.close()
    for name in ("slot0.bin", "slot1.bin"):
        (tmp_path / "run" / name).unlink()
        with open(tmp_path / "run" / name, "wb") as file:
            file.truncate(size)
    store, _ = Store.open([tmp_path / "run"], writable=True)
    for name in ("slot0.bin", "slot1.bin"):
        assert (tmp_path / "run" / name).stat().st_blocks * 512 >= size
    assert store.verify() == []
    store.close()
