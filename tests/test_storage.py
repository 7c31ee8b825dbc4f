"""The store on a real folder: two slots, crashes, direct I/O, and what it says when it cannot go on."""

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import committed_store, content, read, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, System, Transfer, aligned_empty, round_up, store_bytes
from greedysnake.storage.files import BlockFile
from greedysnake.storage.geometry import STRIPE_BYTES
from greedysnake.storage.memory import as_bytes
from greedysnake.storage.small_files import sealed

ROOT = Path(__file__).parents[1]
SLOTS = ("slot0.bin", "slot1.bin")


def run_elsewhere(code: str, folder: Path, **options) -> subprocess.Popen:
    """Another process that runs ``code`` with the folder as its argument."""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options
    )


# What is written is what is read


@st.composite
def histories(draw):
    """Extents, and writes, reads, reverts and commits upon them."""
    names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
    keys = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    blocks = {key: draw(st.integers(0, 5)) for key in keys}
    durable = draw(st.sets(st.sampled_from(keys), min_size=1))
    steps = st.one_of(
        st.tuples(st.just("write"), st.sampled_from(keys), st.integers(0, 2**20), st.integers(1, 3)),
        st.tuples(st.just("revert"), st.sets(st.sampled_from(sorted(durable)))),
        st.tuples(st.just("commit"), st.dictionaries(names, st.integers() | names | st.none(), max_size=2)),
    )
    return blocks, durable, draw(st.lists(steps, max_size=12))


def cut(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """A tensor in at most ``parts`` pieces of whole blocks."""
    size = max(BLOCK_BYTES, round_up(-(-tensor.numel() // parts), BLOCK_BYTES))
    return list(tensor.split(size))


@settings(max_examples=60, deadline=None)
@given(history=histories(), end=st.sampled_from(["close", "crash"]), data=st.data())
def test_a_store_equals_a_dict_with_a_committed_copy(tmp_path_factory, history, end, data):
    blocks, durable, steps = history
    folder = tmp_path_factory.mktemp("store") / "run"
    sizes = {key: count * BLOCK_BYTES for key, count in blocks.items()}
    store = Store.create(
        [folder],
        run="run",
        durable={key: size for key, size in sizes.items() if key in durable},
        scratch={key: size for key, size in sizes.items() if key not in durable},
    )
    current: dict[str, bytes | None] = dict.fromkeys(sizes)  # None: never written, so anything
    committed, contents = {key: current[key] for key in durable}, None
    moved = 0
    for step in steps:
        match step:
            case ("write", key, seed, parts):
                value = content(sizes[key], seed)
                store.write(key, cut(value, parts)).wait()
                current[key] = bytes(value.numpy())
                moved += len(current[key])
            case ("revert", keys):
                store.revert(keys)
                current |= {key: committed[key] for key in keys}
            case ("commit", told):
                store.commit(told)
                committed, contents = {key: current[key] for key in durable}, told
        for key, value in current.items():
            if value is not None:
                start = data.draw(st.integers(0, blocks[key]))
                stop = data.draw(st.integers(start, blocks[key]))
                low, high = start * BLOCK_BYTES, stop * BLOCK_BYTES
                assert read(store, key, high - low, low) == value[low:high]
    assert store.written_bytes == moved
    if end == "close":
        store.close()
    else:  # as a crash at this instant leaves it
        folder = shutil.copytree(folder, folder.with_name("crashed"))
    if contents is None:
        with pytest.raises(StorageError, match="holds no committed store"):
            Store.open([folder])
    else:
        reopened, told = Store.open([folder])
        assert told == contents
        for key, value in committed.items():
            if value is not None:
                assert read(reopened, key, sizes[key]) == value
        reopened.close()
    store.close()


@settings(max_examples=25, deadline=None)
@given(writes=st.lists(st.tuples(st.sampled_from("ab"), st.integers(3, 10**6), st.booleans()), max_size=8))
def test_writes_after_a_commit_never_touch_the_committed_slots(tmp_path_factory, writes):
    folder = tmp_path_factory.mktemp("store") / "run"
    sizes = {"a": BLOCK_BYTES, "b": 3 * BLOCK_BYTES}
    store = small_store(folder)
    expected = {}
    for round_ in range(2):  # the second time, the committed content is in the other slot
        for key, size in sizes.items():
            value = content(size, round_)
            store.write(key, [value]).wait()
            expected[key] = bytes(value.numpy())
        store.commit({"round": round_})
        for key, seed, revert in writes:
            store.write(key, [content(sizes[key], seed)]).wait()
            if revert:
                store.revert([key])
        manifest = json.loads((folder / "manifest.json").read_text())
        offset = 0
        for (key, size), slot in zip(manifest["extents"], manifest["slots"], strict=True):
            assert (folder / SLOTS[slot]).read_bytes()[offset : offset + size] == expected[key]
            offset += size
    store.close()
    reopened, told = Store.open([folder])
    assert told == {"round": 1}
    assert {key: read(reopened, key, size) for key, size in sizes.items()} == expected
    reopened.close()


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from greedysnake.storage import Store, aligned_empty
size = 64 * 4096
store = Store.create([Path(sys.argv[1])], run="run", durable={"a": size}, scratch={})
for number in (1, 2, 3):
    data = aligned_empty(size)
    data.fill_(number)
    store.write("a", [data]).wait()
    if number == 2:
        store.commit({"number": 2})
print("committed", flush=True)
data.fill_(4)
store.write("a", [data])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_last_commit_and_no_lock(tmp_path):
    process = run_elsewhere(KILLED_WRITER, tmp_path / "run")
    assert process.communicate(timeout=60)[0] == "committed\n"
    assert process.returncode == -signal.SIGKILL
    store, contents = Store.open([tmp_path / "run"])
    assert contents == {"number": 2}
    assert set(read(store, "a", 64 * BLOCK_BYTES)) == {2}
    store.close()


def test_transfers_larger_than_one_system_call(tmp_path):
    size = 2 * STRIPE_BYTES + 3 * BLOCK_BYTES
    value = content(size, 5)
    store = Store.create([tmp_path], run="run", durable={"first": BLOCK_BYTES, "big": size}, scratch={})
    store.write("big", [value]).wait()
    assert read(store, "big", size) == bytes(value.numpy())
    assert read(store, "big", STRIPE_BYTES, STRIPE_BYTES) == bytes(value[STRIPE_BYTES:][:STRIPE_BYTES].numpy())
    store.close()


def test_many_transfers_under_way_at_once(tmp_path):
    keys = [f"chunk{i}" for i in range(40)]
    values = {key: content(7 * BLOCK_BYTES, i) for i, key in enumerate(keys)}
    store = Store.create([tmp_path], run="run", durable=dict.fromkeys(keys, 7 * BLOCK_BYTES), scratch={})
    for transfer in [store.write(key, [value]) for key, value in values.items()]:
        transfer.wait()
    into = {key: aligned_empty(7 * BLOCK_BYTES) for key in keys}
    for transfer in [store.read(key, tensor) for key, tensor in into.items()]:
        transfer.wait()
    assert all(torch.equal(into[key], values[key]) for key in keys)
    store.close()


# Scratch


def test_scratch_is_written_in_part_and_replaced(tmp_path):
    store = small_store(tmp_path)
    part = content(BLOCK_BYTES, 3)
    store.write("s", [part]).wait()
    assert read(store, "s", BLOCK_BYTES) == bytes(part.numpy())
    assert store.disk_bytes == store_bytes({"a": BLOCK_BYTES, "b": 3 * BLOCK_BYTES}, {"s": 2 * BLOCK_BYTES})
    store.reserve_scratch({"t": 5 * BLOCK_BYTES})
    assert (tmp_path / "scratch.bin").stat().st_size == 5 * BLOCK_BYTES
    with pytest.raises(ValueError, match="no extent 's'"):
        read(store, "s", BLOCK_BYTES)
    store.write("t", [content(5 * BLOCK_BYTES, 4)]).wait()
    assert read(store, "t", 5 * BLOCK_BYTES) == bytes(content(5 * BLOCK_BYTES, 4).numpy())
    store.close()


def test_scratch_that_does_not_fit_leaves_a_store_without_scratch(tmp_path, monkeypatch):
    store = small_store(tmp_path)
    store.write("a", [content(BLOCK_BYTES, 1)]).wait()
    store.write("b", [content(3 * BLOCK_BYTES, 2)]).wait()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(BLOCK_BYTES))
        for _ in range(2):
            with pytest.raises(StorageError, match=r"the run needs .*2,048,000 bytes.* is free \(4,096 bytes\)"):
                store.reserve_scratch({"t": 500 * BLOCK_BYTES})
    assert read(store, "b", 3 * BLOCK_BYTES) == bytes(content(3 * BLOCK_BYTES, 2).numpy())
    store.reserve_scratch({"t": BLOCK_BYTES})
    store.write("t", [content(BLOCK_BYTES, 3)]).wait()
    store.close()


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


def failing(code: int):
    def call(*_):
        raise OSError(code, os.strerror(code))

    return call


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


# Misuse


def test_misuse_is_a_value_error(tmp_path):
    store = small_store(tmp_path)
    block = aligned_empty(BLOCK_BYTES)
    odd = aligned_empty(3 * BLOCK_BYTES)
    cases = {
        "no extent 'x'": [lambda: store.read("x", block), lambda: store.write("x", [block])],
        r"no durable extents \['x', 's'\]": [lambda: store.revert(["a", "x", "s"])],
        "outside extent 'b' of 12288 bytes": [
            lambda: store.read("b", block, 3 * BLOCK_BYTES),
            lambda: store.read("b", block, -BLOCK_BYTES),
            lambda: store.read("b", aligned_empty(4 * BLOCK_BYTES)),
        ],
        "outside extent 's'": [lambda: store.write("s", [odd])],
        "'b' is written whole: it has 12288 bytes, got 4096": [lambda: store.write("b", [block])],
        "'a' is written whole": [lambda: store.write("a", []), lambda: store.write("a", [block, block])],
        "not in whole blocks of 4096": [
            lambda: store.read("b", odd[64 : 64 + BLOCK_BYTES]),  # memory address
            lambda: store.read("b", block, 512),  # file offset
            lambda: store.read("b", odd[:100]),  # size
            lambda: store.write("b", [odd[:100], odd[100:]]),
        ],
        "not of bytes": [
            lambda: store.read("b", odd.view(torch.float32)),
            lambda: store.read("b", odd[::3]),
        ],
    }
    for message, actions in cases.items():
        for action in actions:
            with pytest.raises(ValueError, match=message):
                action()
    store.close()
    store.close()


def test_extents_that_cannot_be_laid_out(tmp_path):
    for extents, message in [
        ({"durable": {"a": 100}}, "extent 'a' has 100 bytes, which is not a multiple of 4096"),
        ({"scratch": {"s": 4097}}, "extent 's' has 4097 bytes"),
        ({"scratch": {"a": 4096}}, r"extents \['a'\] are both durable and scratch"),
    ]:
        with pytest.raises(ValueError, match=message):
            small_store(tmp_path, **extents)
    small_store(tmp_path).close()  # nothing is left that holds the folder


def test_aligned_memory():
    for count in (0, 1, 4096, 5000, 5 * 2**20):
        tensor = aligned_empty(count)
        assert (tensor.numel(), tensor.dtype, tensor.data_ptr() % BLOCK_BYTES) == (count, torch.uint8, 0)
        assert not tensor.any()
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


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


def test_contents_that_are_not_json_leave_the_last_commit(tmp_path):
    store = small_store(tmp_path)
    store.commit({"step": 1})
    with pytest.raises(ValueError):
        store.commit({"step": object()})
    store.commit({"step": 2})
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "manifest.json", "scratch.bin", *SLOTS]
    reopened, contents = Store.open([tmp_path])
    assert contents == {"step": 2}
    reopened.close()
