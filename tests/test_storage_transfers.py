"""Direct I/O, folders that refuse it, and transfers that go wrong."""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from faulty_system import failing
from stores import SLOTS, committed_store, content, read, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, System, Transfer, aligned_empty
from greedysnake.storage.files import BlockFile
from greedysnake.storage.geometry import STRIPE_BYTES
from greedysnake.storage.memory import as_bytes

# Direct I/O


def resident_bytes(path: Path) -> int:
    """Bytes of a file that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size, descriptor = path.stat().st_size, os.open(path, os.O_RDONLY)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    os.close(descriptor)
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    assert libc.mincore(address, size, pages) == 0, os.strerror(ctypes.get_errno())
    libc.munmap(address, size)
    return sum(page & 1 for page in pages.raw[: -(-size // mmap.PAGESIZE)]) * mmap.PAGESIZE


def refuses_direct(folder: Path) -> bool:
    """Whether the folder's filesystem refuses direct I/O, found out without the package."""
    path = folder / "trial"
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return True
    try:
        os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError:
        return True
    finally:
        os.close(descriptor)
        path.unlink()
    return False


def test_direct_io_leaves_nothing_in_the_page_cache(tmp_path):
    if refuses_direct(tmp_path):
        pytest.skip("the filesystem of the temporary folder refuses direct I/O")
    size = 16 * 2**20
    with ThreadPoolExecutor(2) as pool:
        file = BlockFile(tmp_path / "file", pool, pool, size=size, create=True, system=System())
        assert file.direct
        links = Path("/proc/self/fd").iterdir()
        descriptors = [int(link.name) for link in links if os.path.realpath(link) == str(file.path.resolve())]
        assert len(descriptors) == 1
        assert fcntl.fcntl(descriptors[0], fcntl.F_GETFL) & os.O_DIRECT
        value, into = content(size, 1), aligned_empty(size)
        Transfer([file.write([as_bytes(value)], 0)]).wait()
        Transfer([file.read([as_bytes(into)], 0)]).wait()
        assert torch.equal(value, into)
        assert resident_bytes(tmp_path / "file") == 0
        file.close()
        again = BlockFile(tmp_path / "file", pool, pool, size=size, system=System())
        assert again.direct
        again.close()


def refuse_at_open(monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)


def refuse_at_transfer(monkeypatch):
    real = os.preadv

    def refusing(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)


@pytest.mark.parametrize("refuse", [refuse_at_open, refuse_at_transfer])
def test_buffered_io_with_a_warning_where_direct_io_is_refused(tmp_path, monkeypatch, caplog, refuse):
    refuse(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="greedysnake"):
        values = committed_store(tmp_path / "run", {"step": 1})
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3
    assert str(tmp_path / "run" / "slot0.bin") in warned[0]
    assert "refuses direct I/O" in warned[0]
    caplog.clear()
    store, contents = Store.open([tmp_path / "run"])
    assert len(caplog.records) == 2
    assert contents == {"step": 1}
    assert (read(store, "a", BLOCK_BYTES), read(store, "b", 3 * BLOCK_BYTES)) == values
    store.close()


def test_a_store_on_a_memory_filesystem(monkeypatch):
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    folder = memory / f"greedysnake-test-{os.getpid()}"
    try:
        values = committed_store(folder)
        store, _ = Store.open([folder])
        assert (read(store, "a", BLOCK_BYTES), read(store, "b", 3 * BLOCK_BYTES)) == values
        store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Transfers that go wrong


@pytest.mark.parametrize("step", [512, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_partial_transfers_are_carried_on(tmp_path, monkeypatch, step):
    calls = {"preadv": 0, "pwritev": 0}

    def partial(name):
        real = getattr(os, name)

        def call(descriptor, buffers, offset):
            calls[name] += 1
            return real(descriptor, [buffers[0][:step]], offset)

        monkeypatch.setattr(os, name, call)

    partial("preadv")
    partial("pwritev")
    if step < BLOCK_BYTES:  # shorter than direct I/O may take on every disk
        refuse_at_open(monkeypatch)
    size = 10 * BLOCK_BYTES
    store = Store.create([tmp_path], run="run", durable={"a": size}, scratch={})
    value = content(size, 9)
    calls["preadv"] = calls["pwritev"] = 0
    store.write("a", [value]).wait()
    assert read(store, "a", size) == bytes(value.numpy())
    assert set(calls.values()) == {-(-size // step)}
    store.close()


@pytest.mark.parametrize(("name", "verb"), [("preadv", "read"), ("pwritev", "write")])
def test_a_disk_error_names_the_file_and_the_place(tmp_path, monkeypatch, name, verb):
    store = small_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(errno.EIO))
        transfer = (
            store.read("b", aligned_empty(BLOCK_BYTES), BLOCK_BYTES)
            if verb == "read"
            else store.write("b", [aligned_empty(3 * BLOCK_BYTES)])
        )
        with pytest.raises(StorageError) as caught:
            transfer.wait()
    count, offset, slot = ("4,096", 8192, 0) if verb == "read" else ("12,288", 4096, 1)
    path = tmp_path / SLOTS[slot]
    assert str(caught.value) == f"cannot {verb} {count} bytes at byte {offset} of {path}: Input/output error"
    store.close()


def test_a_file_that_is_too_short_says_where_it_ends(tmp_path):
    committed_store(tmp_path)
    store, _ = Store.open([tmp_path])
    for name in SLOTS:
        os.truncate(tmp_path / name, 2 * BLOCK_BYTES)
    with pytest.raises(StorageError, match=r"cannot read .*slot1\.bin at byte 8192: the file ends there"):
        read(store, "b", 3 * BLOCK_BYTES)
    store.close()


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_commit_that_fails_leaves_the_last_one_and_stops_writes(tmp_path, monkeypatch, name):
    store = small_store(tmp_path)
    old, new = content(BLOCK_BYTES, 1), content(BLOCK_BYTES, 2)
    store.write("a", [old]).wait()
    store.commit({"step": 1})
    store.write("a", [new]).wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(errno.EIO))
        with pytest.raises(StorageError, match=rf"{tmp_path}.*Input/output error"):
            store.commit({"step": 2})
    for action in (lambda: store.write("a", [new]), lambda: store.commit({})):
        with pytest.raises(StorageError, match=r"takes no more writes, as a commit failed: .*Input/output error"):
            action()
    store.write("s", [new]).wait()  # scratch makes no promise
    store.close()
    reopened, contents = Store.open([tmp_path])
    assert contents == {"step": 1}
    assert read(reopened, "a", BLOCK_BYTES) == bytes(old.numpy())
    reopened.close()


def test_a_folder_that_cannot_be_flushed_keeps_the_new_commit_whole(tmp_path, monkeypatch):
    store = small_store(tmp_path)
    real = os.fsync

    def fail_for_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            failing(errno.EIO)()
        real(descriptor)

    new = content(BLOCK_BYTES, 2)
    store.write("a", [new]).wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_folders)
        with pytest.raises(StorageError, match=r"cannot write .*manifest\.json: Input/output error"):
            store.commit({"step": 1})
    with pytest.raises(StorageError, match="takes no more writes"):
        store.write("a", [content(BLOCK_BYTES, 3)])
    store.close()
    reopened, contents = Store.open([tmp_path])  # the rename had happened
    assert contents == {"step": 1}
    assert read(reopened, "a", BLOCK_BYTES) == bytes(new.numpy())
    reopened.close()


def test_waiting_ends_when_no_piece_moves_any_more_also_after_an_error(tmp_path, monkeypatch):
    size = 4 * STRIPE_BYTES
    store = Store.create([tmp_path], run="run", durable={"a": size}, scratch={})
    real, ended = os.pwritev, []

    def slow_but_first_fails(descriptor, buffers, offset):
        if offset == 0:
            failing(errno.EIO)()
        time.sleep(0.1)
        moved = real(descriptor, buffers, offset)
        ended.append(offset)
        return moved

    monkeypatch.setattr(os, "pwritev", slow_but_first_fails)
    with pytest.raises(StorageError, match="Input/output error"):
        store.write("a", [aligned_empty(size)]).wait()
    assert sorted(ended) == [STRIPE_BYTES, 2 * STRIPE_BYTES, 3 * STRIPE_BYTES]
    store.close()
