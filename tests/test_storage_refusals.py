"""What a store is not made in or opened from: full disks, folders in use or out of reach, damaged files."""

import errno
import fcntl
import json
import os
import shutil
from collections import namedtuple

import pytest
from elsewhere import run_elsewhere
from faulty_system import failing
from stores import SLOTS, committed_store, read, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store
from greedysnake.storage.small_files import sealed

# Disks that are too small


def test_too_little_disk_names_the_folder_the_need_and_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(3 * 2**30))
    with pytest.raises(StorageError) as caught:
        small_store(tmp_path / "run", durable={"a": 2**31}, scratch={"s": 2**30})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'run'}: ")
    for part in ("5,368,709,120 bytes", "3,221,225,472 bytes", "Free 2", "larger disk with engine.storage"):
        assert part in message
    assert not list((tmp_path / "run").glob("*.bin"))
    monkeypatch.undo()
    small_store(tmp_path / "run").close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_file_that_cannot_be_reserved(tmp_path, monkeypatch, code):
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(code))
        with pytest.raises(StorageError) as caught:
            small_store(tmp_path)
    assert str(caught.value) == (
        f"cannot reserve 16,384 bytes for {tmp_path / 'slot0.bin'}: {os.strerror(code)}. "
        "Free space there, or choose another folder with engine.storage"
    )
    small_store(tmp_path).close()  # the folder is free again


def test_all_disk_is_reserved_at_once(tmp_path):
    store = small_store(tmp_path, durable={"a": 2**20}, scratch={"s": 2**21})
    for name, size in [("slot0.bin", 2**20), ("slot1.bin", 2**20), ("scratch.bin", 2**21)]:
        status = (tmp_path / name).stat()
        assert (status.st_size, status.st_blocks * 512 >= size) == (size, True)
    store.close()


# Folders that cannot be used

HOLDER = """
import sys, time
from pathlib import Path
from greedysnake.storage import Store
store = Store.create([Path(sys.argv[1])], run="run", durable={"a": 4096}, scratch={})
store.commit({"step": 7})
print("held", flush=True)
time.sleep(600)
"""


def test_a_folder_in_use_by_another_process(tmp_path):
    process = run_elsewhere(HOLDER, tmp_path)
    try:
        assert process.stdout.readline() == "held\n"
        for action in (lambda: small_store(tmp_path), lambda: Store.open([tmp_path])):
            with pytest.raises(StorageError) as caught:
                action()
            assert str(caught.value) == (
                f"{tmp_path} is in use by process {process.pid}. Wait for it, stop it, or choose another folder "
                "with engine.storage"
            )
    finally:
        process.kill()
        process.communicate(timeout=60)
    store, contents = Store.open([tmp_path])
    assert contents == {"step": 7}
    store.close()


def test_two_stores_of_one_process_exclude_each_other(tmp_path):
    store = small_store(tmp_path)
    store.commit({})
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
        Store.open([tmp_path])
    store.close()
    Store.open([tmp_path])[0].close()


def test_a_filesystem_without_locks_is_not_called_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(StorageError, match=f"cannot lock the storage folder {tmp_path}: No locks available"):
        small_store(tmp_path)


def test_a_full_disk_does_not_spoil_the_lock(tmp_path, monkeypatch):
    values = committed_store(tmp_path)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    store, _ = Store.open([tmp_path])
    assert read(store, "a", BLOCK_BYTES) == values[0]
    store.close()


def test_a_folder_that_holds_a_store_is_not_overwritten(tmp_path):
    values = committed_store(tmp_path, {"step": 3})
    with pytest.raises(StorageError) as caught:
        small_store(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} already holds the store of another run. Choose another folder with engine.storage, or delete "
        "this one if its run is not needed any more"
    )
    store, contents = Store.open([tmp_path])
    assert (contents, read(store, "a", BLOCK_BYTES)) == ({"step": 3}, values[0])
    store.close()


def test_what_a_run_without_a_commit_left_is_replaced(tmp_path):
    store = small_store(tmp_path, durable={"a": 64 * BLOCK_BYTES})
    store.close()
    with pytest.raises(StorageError, match=r"holds no committed store: manifest\.json is missing"):
        Store.open([tmp_path])
    small_store(tmp_path).close()
    assert (tmp_path / "slot0.bin").stat().st_size == 4 * BLOCK_BYTES


def test_a_file_in_place_of_the_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("not a folder")
    for folder, reason in [(path, "File exists"), (path / "run", "Not a directory")]:
        with pytest.raises(StorageError) as caught:
            small_store(folder)
        assert str(caught.value) == f"cannot make the storage folder {folder}: {reason}"
    for folder in (path, tmp_path / "missing"):
        with pytest.raises(StorageError, match=f"{folder} is not a folder, so there is no store to read"):
            Store.open([folder])
    assert path.read_text() == "not a folder"


def test_a_folder_that_cannot_be_locked(tmp_path):
    committed_store(tmp_path)
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    with pytest.raises(StorageError) as caught:
        Store.open([tmp_path])
    assert str(caught.value) == f"cannot write to the storage folder {tmp_path}: Is a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        small_store(tmp_path)


def test_a_folder_without_a_store_is_left_as_it_is(tmp_path):
    with pytest.raises(StorageError, match="holds no committed store"):
        Store.open([tmp_path])
    assert not list(tmp_path.iterdir())


def test_nobody_else_can_read_the_files(tmp_path):
    before = os.umask(0)
    try:
        committed_store(tmp_path / "run")
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()}
    assert modes == dict.fromkeys(["lock", "manifest.json", "scratch.bin", *SLOTS], 0o600)


# Damage


def changed(**values):
    return lambda text: sealed(json.dumps(unsealed(text) | values).encode())


def without(name):
    return lambda text: sealed(json.dumps({k: v for k, v in unsealed(text).items() if k != name}).encode())


def unsealed(text):
    return {key: value for key, value in json.loads(text).items() if key != "crc32c"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: "", r"cannot read .*manifest\.json: Expecting value"),
        (lambda text: text[: len(text) // 2], r"cannot read .*manifest\.json: "),
        (lambda _: b"\xff\xfe\xfa", r"cannot read .*manifest\.json: "),
        (lambda _: "[1, 2]", "is not the manifest of a store"),
        (lambda _: "{}", "is not the manifest of a store"),
        (changed(format="something"), "is not the manifest of a store"),
        (changed(version=1), "has format version 1; this version of greedysnake reads 3"),
        (lambda _: json.dumps({"format": "greedysnake-store", "version": 1}), "has format version 1; this"),
        (lambda text: text.replace("4096", "8192"), "its checksum does not fit its content"),
        (lambda text: json.dumps(unsealed(text)), "its checksum does not fit its content"),
        (without("version"), "has format version None; "),
        (without("run"), "damaged at 'run': Field required"),
        (without("slots"), "damaged at 'slots': Field required"),
        (changed(more=1), "damaged at 'more': "),
        (changed(slots="no"), "damaged at 'slots': Input should be a valid list"),
        (changed(extents=[["a", 4096], ["b", "many"]]), r"damaged at 'extents\.1\.1': "),
        (changed(extents=[["a", 4096, 1], ["b", 12288]]), "damaged at 'extents.0"),
        (changed(contents=3), "damaged at 'contents': "),
        (changed(slots=[0]), "its slots do not match its extents"),
        (changed(slots=[0, 1, 0]), "its slots do not match its extents"),
        (changed(slots=[0, 2]), "its slots do not match its extents"),
        (changed(slots=[0, -1]), "its slots do not match its extents"),
        (changed(extents=[["a", 4096], ["a", 12288]]), "its extents are not distinct names of whole blocks"),
        (changed(extents=[["a", 4096], ["b", 100]]), "its extents are not distinct names of whole blocks"),
        (changed(extents=[["a", 4096], ["b", -4096]]), "its extents are not distinct names of whole blocks"),
        (changed(fixed=[["a", 4096]]), "its extents are not distinct names of whole blocks"),
        (changed(fixed=[["f", 4096]]), "its checksums do not match its extents"),
        (changed(fixed_checksums=[[1]]), "its checksums do not match its extents"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, damage, message):
    committed_store(tmp_path)
    path = tmp_path / "manifest.json"
    told = damage(path.read_text())
    path.write_bytes(told if isinstance(told, bytes) else told.encode())
    with pytest.raises(StorageError, match=message) as caught:
        Store.open([tmp_path])
    assert str(path) in str(caught.value)
    with pytest.raises(StorageError, match="already holds the store"):
        small_store(tmp_path)  # damage is no reason to delete it


@pytest.mark.parametrize("name", SLOTS)
def test_a_missing_data_file_is_named(tmp_path, name):
    committed_store(tmp_path)
    (tmp_path / name).unlink()
    for _ in range(2):  # the folder is not held after the first
        with pytest.raises(StorageError) as caught:
            Store.open([tmp_path])
        assert str(caught.value) == f"cannot open {tmp_path / name}: No such file or directory"
    assert not (tmp_path / name).exists()
