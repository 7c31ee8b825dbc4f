"""Extents that are written once: before the first commit, in one slot."""

import errno
import json
from collections.abc import Sequence

import pytest
from stores import content, read, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, System, disk_budget, remove_store, store_bytes

FIXED = {"f": 3 * BLOCK_BYTES, "g": 2 * BLOCK_BYTES}


def made(folder, **options) -> Store:
    store = small_store(folder, fixed=FIXED, **options)
    for key, size in FIXED.items():
        store.write(key, [content(size, size)]).wait()
    store.write("a", [content(BLOCK_BYTES, 1)]).wait()
    return store


def kept(store: Store) -> bool:
    return all(read(store, key, size) == bytes(content(size, size).numpy()) for key, size in FIXED.items())


@pytest.mark.parametrize("slots", [1, 2])
def test_fixed_extents_last_and_are_only_read_after_the_first_commit(tmp_path, slots):
    store = made(tmp_path, slots=slots)
    assert kept(store)
    store.commit({})
    path = tmp_path / "fixed.bin"
    before = path.read_bytes()
    assert len(before) == sum(FIXED.values())
    with pytest.raises(ValueError, match="'f' is fixed: the store has a commit, so it is only read"):
        store.write("f", [content(FIXED["f"], 5)])
    store.write("a", [content(BLOCK_BYTES, 2)]).wait()
    store.commit({})
    assert kept(store)
    store.close()
    store, _ = Store.open([tmp_path], writable=True)
    assert kept(store)
    assert store.verify() == []
    with pytest.raises(ValueError, match="'g' is fixed"):
        store.write("g", [content(FIXED["g"], 5)])
    store.close()
    assert path.read_bytes() == before


def test_each_is_written_until_a_commit_names_it_also_after_a_crash(tmp_path):
    store = small_store(tmp_path, fixed=FIXED)
    store.write("f", [content(FIXED["f"], 9)]).wait()
    store.write("f", [content(FIXED["f"], FIXED["f"])]).wait()
    store.commit({})
    with pytest.raises(ValueError, match="'f' is fixed"):
        store.write("f", [content(FIXED["f"], 5)])
    store.write("g", [content(FIXED["g"], 9)]).wait()  # and nothing commits it
    store.close()
    store, _ = Store.open([tmp_path])
    assert store.verify() == []
    assert read(store, "f", FIXED["f"]) == bytes(content(FIXED["f"], FIXED["f"]).numpy())
    read(store, "g", FIXED["g"])  # whatever is there
    store.close()
    store, _ = Store.open([tmp_path], writable=True)
    with pytest.raises(ValueError, match="'f' is fixed"):
        store.write("f", [content(FIXED["f"], 5)])
    store.write("g", [content(FIXED["g"], FIXED["g"])]).wait()
    store.commit({})
    store.close()
    store, _ = Store.open([tmp_path], writable=True)
    with pytest.raises(ValueError, match="'g' is fixed"):
        store.write("g", [content(FIXED["g"], 5)])
    assert store.verify() == []
    assert kept(store)
    store.close()


def test_they_take_their_disk_once(tmp_path):
    store = made(tmp_path)
    assert store.disk_bytes == 2 * 4 * BLOCK_BYTES + 5 * BLOCK_BYTES + 2 * BLOCK_BYTES
    assert store.disk_use()[0].needed == store.disk_bytes
    durable, scratch = {"a": BLOCK_BYTES, "b": 3 * BLOCK_BYTES}, {"s": 2 * BLOCK_BYTES}
    assert store_bytes(durable, scratch, fixed=FIXED) == store.disk_bytes
    assert disk_budget([tmp_path], durable, scratch, fixed=FIXED)[0].needed == store.disk_bytes
    store.close()


def test_damage_is_found(tmp_path):
    store = made(tmp_path)
    store.commit({})
    store.close()
    path = tmp_path / "fixed.bin"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    store, _ = Store.open([tmp_path])
    found = store.verify()
    store.close()
    assert [(damage.path, damage.key) for damage in found] == [(path, "g")]
    path.write_bytes(damaged[:-BLOCK_BYTES])
    with pytest.raises(StorageError, match=r"fixed\.bin is damaged: it has .* bytes"):
        Store.open([tmp_path])


class _Failing(System):
    """A disk that takes no more writes once ``broken`` is set."""

    broken = False

    def pwritev(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        return super().pwritev(descriptor, parts, offset)


def test_a_write_that_fails_is_never_committed(tmp_path):
    system = _Failing()
    store = small_store(tmp_path, fixed=FIXED, system=system)
    system.broken = True
    with pytest.raises(StorageError):
        store.write("f", [content(FIXED["f"], 1)]).wait()
    system.broken = False
    with pytest.raises(StorageError, match="takes no more writes"):
        store.commit({})
    store.close()
    assert not (tmp_path / "manifest.json").exists()


def test_several_folders_share_them_and_lose_them_with_the_store(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    store = Store.create(
        folders, run="run", durable={"a": BLOCK_BYTES}, scratch={}, fixed=FIXED, stripe_bytes=BLOCK_BYTES
    )
    for key, size in FIXED.items():
        store.write(key, [content(size, size)]).wait()
    store.commit({})
    store.close()
    assert [(folder / "fixed.bin").stat().st_size for folder in folders] == [3 * BLOCK_BYTES, 2 * BLOCK_BYTES]
    store, _ = Store.open(folders)
    assert kept(store)
    store.close()
    assert remove_store(folders) == []
    assert not any(folder.exists() for folder in folders)


def test_a_store_that_was_never_committed_leaves_nothing_in_the_way(tmp_path):
    made(tmp_path).close()
    store = made(tmp_path)
    assert kept(store)
    store.close()


def test_their_names_are_their_own(tmp_path):
    with pytest.raises(ValueError, match="not distinct names"):
        small_store(tmp_path, fixed={"a": BLOCK_BYTES})
    with pytest.raises(ValueError, match="both durable and scratch"):
        small_store(tmp_path, fixed={"s": BLOCK_BYTES})


def test_the_manifest_lists_them(tmp_path):
    store = made(tmp_path)
    store.commit({})
    store.close()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert dict(manifest["fixed"]) == FIXED
    assert [len(own) for own in manifest["fixed_checksums"]] == [1, 1]
