"""Stores over several folders: any history, the disk that they take, and folders that are not the store's."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import content, read

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, System, disk_budget, store_bytes
from greedysnake.storage.identity import Identity

SIZES = {"a": 5 * BLOCK_BYTES, "b": 0, "c": 12 * BLOCK_BYTES, "d": BLOCK_BYTES}
SCRATCH = {"s": 7 * BLOCK_BYTES}


def folders_in(base: Path, count: int) -> list[Path]:
    return [base / f"disk{i}" / "run" for i in range(count)]


def striped_store(folders: list[Path], **options) -> Store:
    chosen = {"run": "run", "durable": SIZES, "scratch": SCRATCH, "stripe_bytes": 2 * BLOCK_BYTES}
    return Store.create(folders, **(chosen | options))


def committed_striped(folders: list[Path], **options) -> dict[str, bytes]:
    """A closed store with a commit; what its extents hold."""
    store = striped_store(folders, **options)
    found = {}
    for seed, (key, size) in enumerate(SIZES.items()):
        value = content(size, seed)
        store.write(key, [value]).wait()
        found[key] = bytes(value.numpy())
    store.commit({"step": 1})
    store.close()
    return found


def held_by(store: Store) -> dict[str, bytes]:
    return {key: read(store, key, size) for key, size in SIZES.items()}


# Any history


STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from([*SIZES, *SCRATCH]), st.integers(0, 2**20)),
    st.tuples(st.just("revert"), st.sets(st.sampled_from(sorted(SIZES)))),
    st.tuples(st.just("commit"), st.integers()),
    st.tuples(st.just("reopen"), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    stripe_blocks=st.integers(1, 4),
    slots=st.sampled_from([1, 2]),
    steps=st.lists(STEPS, max_size=14),
)
def test_a_striped_store_equals_a_dict_however_often_it_is_opened(
    tmp_path_factory, weights, stripe_blocks, slots, steps
):
    folders = folders_in(tmp_path_factory.mktemp("store"), len(weights))
    store = striped_store(folders, weights=weights, stripe_bytes=stripe_blocks * BLOCK_BYTES, slots=slots)
    zeroes = {key: bytes(size) for key, size in SIZES.items()}
    current, committed, contents, scratch, dirty = dict(zeroes), dict(zeroes), None, {}, set()
    for step in steps:
        match step:
            case ("write", key, seed):
                size = SIZES.get(key, SCRATCH.get(key))
                value = content(size, seed)
                store.write(key, [value]).wait()
                (current if key in SIZES else scratch)[key] = bytes(value.numpy())
                if key in SIZES:
                    dirty.add(key)
            case ("revert", keys):
                if slots == 1 and dirty & keys:
                    with pytest.raises(StorageError, match="cannot be taken back"):
                        store.revert(keys)
                else:
                    store.revert(keys)
                    current |= {key: committed[key] for key in keys}
                    dirty -= keys
            case ("commit", told):
                store.commit({"told": told})
                committed, contents, dirty = dict(current), {"told": told}, set()
            case ("reopen", writable):
                store.close()
                if contents is None or (slots == 1 and dirty):
                    with pytest.raises(StorageError, match=r"no committed store|has one slot"):
                        Store.open(folders, writable=writable)
                    return
                if not writable:
                    store, told = Store.open(folders)
                    assert (told, held_by(store), store.verify()) == (contents, committed, [])
                    store.close()
                store, told = Store.open(folders, writable=True)
                assert told == contents
                current, scratch, dirty = dict(committed), {}, set()
                store.reserve_scratch(SCRATCH)
        assert held_by(store) == current
        assert all(read(store, key, SCRATCH[key]) == value for key, value in scratch.items())
        if slots == 1 and dirty:
            with pytest.raises(StorageError, match="nothing to verify"):
                store.verify()
        else:
            assert store.verify() == []
    assert store.disk_bytes == store_bytes(SIZES, SCRATCH, slots=slots)
    files = [path for folder in folders for path in folder.glob("*.bin")]
    assert sum(path.stat().st_size for path in files) == store.disk_bytes
    store.close()


def test_the_stripes_of_an_extent_lie_on_all_folders(tmp_path):
    folders = folders_in(tmp_path, 3)
    store = striped_store(folders, durable={"c": 24 * BLOCK_BYTES}, scratch={}, weights=[2, 1, 1])
    value = content(24 * BLOCK_BYTES, 1)
    store.write("c", [value]).wait()
    store.commit({})
    store.close()
    parts = [(folder / "slot1.bin").read_bytes() for folder in folders]
    assert [len(part) for part in parts] == [12 * BLOCK_BYTES, 6 * BLOCK_BYTES, 6 * BLOCK_BYTES]
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    taken, whole = [0, 0, 0], b""
    for stripe in range(12):
        folder = manifest["pattern"][stripe % len(manifest["pattern"])]
        whole += parts[folder][taken[folder] :][: manifest["stripe_bytes"]]
        taken[folder] += manifest["stripe_bytes"]
    assert whole == bytes(value.numpy())


# Folders that are not the store's


def test_folders_in_another_order_are_refused(tmp_path):
    folders = folders_in(tmp_path, 3)
    committed_striped(folders)
    first, second, third = folders
    cases = [
        ([first, third, second], f"{third} is folder 3 of 3 of the store of run run, and was given in place 2"),
        ([second, first, third], f"{second} is folder 2 of 3 of the store of run run, and was given first"),
        ([first, second], f"the store in {first} has 3 folders, and 2 given: {first}, {second}"),
        ([first], f"the store in {first} has 3 folders, and 1 given"),
        ([first, second, second], f"{second} and {second} are the same folder"),
        ([third], f"{third} is folder 3 of 3 of the store of run run, and was given first"),
        ([first, second, tmp_path], f"{tmp_path} holds no folder.json, so it is not folder 3 of 3"),
        ([first, second, tmp_path / "none"], f"{tmp_path / 'none'} is not a folder"),
    ]
    for given_, message in cases:
        for writable in (False, True):
            with pytest.raises(StorageError) as caught:
                Store.open(given_, writable=writable)
            assert message in str(caught.value)
    Store.open(folders)[0].close()
    assert not (tmp_path / "lock").exists()


def test_a_folder_of_another_store_is_refused_also_of_the_same_run(tmp_path):
    own, other = folders_in(tmp_path / "own", 2), folders_in(tmp_path / "other", 2)
    committed_striped(own)
    committed_striped(other)
    with pytest.raises(StorageError) as caught:
        Store.open([own[0], other[1]], writable=True)
    assert str(other[1]) in str(caught.value)
    assert "a different store" in str(caught.value)
    for path in ("folder.json", "slot0.bin"):
        shutil.copy(other[1] / path, own[1] / path)
    with pytest.raises(StorageError, match="a different store"):
        Store.open(own)


def test_a_damaged_identity_is_named(tmp_path):
    folders = folders_in(tmp_path, 2)
    committed_striped(folders)
    path = folders[1] / "folder.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(StorageError) as caught:
            Store.open(folders)
        assert str(path) in str(caught.value)
    path.write_bytes(whole)
    Store.open(folders)[0].close()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("change", ["missing", "short", "long", "link", "folder"])
def test_a_data_file_that_is_not_as_it_was_is_refused(tmp_path, change, writable):
    folders = folders_in(tmp_path, 2)
    values = committed_striped(folders)
    path = folders[1] / "slot0.bin"
    kept = path.rename(tmp_path / "kept")
    match change:
        case "short" | "long":
            shutil.copy(kept, path)
            os.truncate(path, kept.stat().st_size + (BLOCK_BYTES if change == "long" else -BLOCK_BYTES))
        case "link":
            path.symlink_to(kept)
        case "folder":
            path.mkdir()
    expected = {
        "missing": "cannot open {path}: No such file or directory",
        "short": "{path} is damaged: it has 28,672 bytes, and the store's manifest says 32,768",
        "long": "{path} is damaged: it has 36,864 bytes, and the store's manifest says 32,768",
        "link": "cannot open {path}: Too many levels of symbolic links (it is a symbolic link",
        "folder": "{path}",
    }[change]
    with pytest.raises(StorageError) as caught:
        Store.open(folders, writable=writable)
    assert expected.format(path=path) in str(caught.value)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    kept.rename(path)
    store, _ = Store.open(folders, writable=writable)
    assert held_by(store) == values
    store.close()


@pytest.mark.parametrize("name", ["manifest.json", "folder.json", "lock"])
def test_a_link_in_place_of_a_small_file_is_not_followed(tmp_path, name):
    folders = folders_in(tmp_path, 2)
    committed_striped(folders)
    path = folders[0] / name
    kept = path.rename(tmp_path / "kept")
    path.symlink_to(kept)
    before = kept.read_bytes()
    with pytest.raises(StorageError, match=r"it is a symbolic link, which a store does not follow"):
        Store.open(folders, writable=True)
    assert kept.read_bytes() == before


def test_a_store_is_not_made_where_part_of_one_is(tmp_path):
    folders = folders_in(tmp_path, 2)
    committed_striped(folders)
    new = tmp_path / "new"
    for given_ in ([new, folders[1]], [folders[1], new], [folders[1]]):
        with pytest.raises(StorageError) as caught:
            striped_store(given_)
        assert f"{folders[1]} is folder 2 of 2 of the store of run run. Choose another" in str(caught.value)
        assert not new.exists()
    Store.open(folders)[0].close()


def test_what_a_striped_run_without_a_commit_left_is_replaced_in_any_order(tmp_path):
    folders = folders_in(tmp_path, 2)
    striped_store(folders).close()
    with pytest.raises(StorageError, match="is folder 2 of 2"):  # of a run that may have its first folder elsewhere
        striped_store(folders[1:])
    striped_store(folders[::-1]).close()
    values = committed_striped(folders)
    store, _ = Store.open(folders)
    assert held_by(store) == values
    store.close()


def test_folders_given_twice_or_not_at_all(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for twice in ([tmp_path / "run"] * 2, [tmp_path / "run", tmp_path / "link"]):
        if twice[1] != twice[0]:
            (tmp_path / "run").mkdir()
        with pytest.raises(StorageError, match=r"run and .* are the same folder\. Give each"):
            striped_store(twice)
    assert not list((tmp_path / "run").iterdir())
    for arguments in ({"folders": []}, {"folders": [tmp_path], "weights": [1, 2]}, {"folders": [tmp_path], "slots": 3}):
        with pytest.raises(ValueError, match=r"folders do not make|1 or 2 slots"):
            striped_store(**arguments)


def test_files_of_the_user_are_never_taken(tmp_path):
    folders = folders_in(tmp_path, 2)
    for name in ("notes.txt", "model", "slot2.bin"):
        shutil.rmtree(tmp_path / "disk1", ignore_errors=True)
        (folders[1] / name).mkdir(parents=True)
        (folders[1] / name / "config.json").write_text("mine")
        with pytest.raises(StorageError) as caught:
            striped_store(folders)
        assert f"{folders[1]} holds other files ({name}), so it is not used" in str(caught.value)
        assert not folders[0].exists()
        assert (folders[1] / name / "config.json").read_text() == "mine"


def test_new_folders_and_files_are_their_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        folders = [tmp_path / "some" / "where" / f"disk{i}" for i in range(2)]
        committed_striped(folders)
    finally:
        os.umask(before)
    for path in (tmp_path / "some").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    names = {"folder.json", "lock", "manifest.json", "scratch.bin", "slot0.bin", "slot1.bin"}
    assert [{path.name for path in folder.iterdir()} for folder in folders] == [names, names - {"manifest.json"}]


def test_leftovers_of_a_manifest_that_was_being_written_are_removed(tmp_path):
    folders = folders_in(tmp_path, 2)
    committed_striped(folders)
    left = [folders[0] / ".manifest.json.0123abc", folders[1] / ".folder.json.99"]
    for path in left:
        path.write_text("half")
    Store.open(folders)[0].close()
    assert all(path.exists() for path in left)  # reading changes nothing
    Store.open(folders, writable=True)[0].close()
    assert not any(path.exists() for path in left)


# Disk


class Free(System):
    """A machine whose file systems have so much free, and are told apart by the folder's name."""

    def __init__(self, **free: int) -> None:
        self._free = free

    def free_bytes(self, folder: Path) -> int:
        return next((size for name, size in self._free.items() if name in str(folder)), 2**40)


def test_a_budget_says_what_each_folder_takes(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two" / "deep"]
    store = striped_store(folders, weights=[3, 1], slots=1)
    budget = disk_budget(folders, SIZES, SCRATCH, slots=1, geometry=store.geometry, system=Free(one=10**9))
    on_disk = [sum(path.stat().st_size for path in folder.glob("*.bin")) for folder in folders]
    assert [one.needed for one in budget] == on_disk
    assert [one.free for one in budget] == [10**9, 2**40]
    assert [one.left for one in budget] == [10**9 - sum(on_disk), 2**40 - sum(on_disk)]  # both are on one file system
    store.close()
    fresh = disk_budget([tmp_path / "not" / "there"], SIZES, {}, system=Free())
    assert (fresh[0].needed, fresh[0].free) == (2 * sum(SIZES.values()), 2**40)


def test_folders_on_one_file_system_must_fit_there_together(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    needed = store_bytes(SIZES, SCRATCH)
    with pytest.raises(StorageError) as caught:
        striped_store(folders, system=Free(one=needed - 1, two=needed - 1))
    message = str(caught.value)
    assert f"{folders[0]} and {folders[1]}: the run needs " in message
    assert f"({needed:,} bytes)" in message
    assert f"({needed - 1:,} bytes)" in message
    assert not list(tmp_path.iterdir())
    striped_store(folders, system=Free(one=needed, two=needed)).close()


# Rates


def test_folders_are_weighed_by_their_rates_only_where_it_matters(tmp_path):
    tried = []

    class Recorded(System):
        def open(self, path, flags):
            tried.append(path.name)
            return super().open(path, flags)

    striped_store(folders_in(tmp_path, 2), system=Recorded()).close()
    assert "rate.bin" not in tried
    large = {"big": 520 * 2**20}
    store = Store.create(folders_in(tmp_path / "large", 2), run="run", durable=large, scratch={}, system=Recorded())
    assert tried.count("rate.bin") >= 4
    assert all(1 <= weight <= 8 for weight in store.geometry.weights)
    assert not list(tmp_path.rglob("rate.bin"))
    store.close()


def test_an_identity_is_read_as_it_was_written(tmp_path):
    system = System()
    assert Identity.read(tmp_path, system) is None
    identity = Identity(run="ü\n", store="s", index=1, count=2)
    identity.write(tmp_path, system)
    assert Identity.read(tmp_path, system) == identity
