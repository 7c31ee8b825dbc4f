"""System calls that fail or are interrupted, each one in turn: one clear error, and the last commit whole."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_system import CALLS, FaultySystem, fails
from simulated_disk import SimulatedDisk
from stores import committed_store, content, read, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, System, remove_store

SIZES = {"a": 2 * BLOCK_BYTES, "b": 3 * BLOCK_BYTES}
FOLDERS = [Path("/disk0/run"), Path("/disk1/run")]
CODES = ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EPERM", "ENOENT", "ESTALE"]


def life(disk: SimulatedDisk, slots: int) -> None:
    """All that is ever done with a store."""
    store = Store.create(
        FOLDERS,
        run="run",
        durable=SIZES,
        scratch={"s": BLOCK_BYTES},
        slots=slots,
        weights=[2, 1],
        stripe_bytes=BLOCK_BYTES,
        system=disk,
    )
    try:
        for number in (1, 2):
            for key, size in SIZES.items():
                store.write(key, [content(size, number)]).wait()
            store.write("s", [content(BLOCK_BYTES, 1)]).wait()
            store.commit({"number": number})
    finally:
        store.close()
    store, contents = Store.open(FOLDERS, writable=True, system=disk)
    try:
        assert contents == {"number": 2}
        store.reserve_scratch({"s": 2 * BLOCK_BYTES})
        store.write("a", [content(SIZES["a"], 3)]).wait()
        store.commit({"number": 3})
        for damage in store.verify():
            raise StorageError(str(damage))
    finally:
        store.close()
    store, contents = Store.open(FOLDERS, system=disk)
    try:
        assert contents == {"number": 3}
        assert read(store, "a", SIZES["a"]) == bytes(content(SIZES["a"], 3).numpy())
        assert read(store, "b", SIZES["b"]) == bytes(content(SIZES["b"], 2).numpy())
    finally:
        store.close()


def problem_of(action: Callable[[], object]) -> str | None:
    """What an action complains about."""
    try:
        action()
    except StorageError as error:
        return str(error)
    return None


class Nth:
    """Raises an error before one call of a disk.

    Attributes:
        at: number of the call, from 0.
        met: name and path of that call, once it was made.
        made: calls so far.
    """

    def __init__(self, at: int, error: OSError) -> None:
        self.at = at
        self.met: tuple[str, str] | None = None
        self.made = 0
        self._error = error
        self._lock = threading.Lock()

    def __call__(self, name: str, path: str) -> None:
        with self._lock:
            self.made += 1
            struck = self.made == self.at + 1
        if struck:
            self.met = name, path
            raise self._error


def calls_of_a_life(slots: int) -> int:
    disk = SimulatedDisk()
    disk.before = counter = Nth(-1, OSError())
    life(disk, slots)
    return counter.made


@pytest.mark.parametrize("slots", [1, 2])
def test_an_interrupted_call_is_made_again(slots):
    for at in range(calls_of_a_life(slots)):
        disk = SimulatedDisk()
        disk.before = Nth(at, InterruptedError(errno.EINTR, os.strerror(errno.EINTR)))
        life(disk, slots)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("first", range(len(CODES)), ids=CODES)
def test_a_call_that_fails_gives_one_error_that_says_where_and_why(slots, first):
    count, told = calls_of_a_life(slots), 0
    for at in range(first % 4, count, 4):  # the codes share the calls: each call meets two of them
        code = getattr(errno, CODES[first])
        disk = SimulatedDisk()
        disk.before = nth = Nth(at, OSError(code, os.strerror(code)))
        problem = problem_of(lambda disk=disk: life(disk, slots))
        if problem is not None:
            told += 1
            assert any(str(folder) in problem for folder in FOLDERS), (nth.met, problem)
            words = [
                os.strerror(code),
                "is not a folder",
                "holds no committed store",
                "it is not folder",
                "File exists",
            ]
            assert any(word in problem for word in words), (nth.met, problem)
            assert "\n" not in problem
            assert len(problem) < 400
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("greedysnake")]
        assert threads == []
        disk.before = None
        assert_whole(disk, slots)
    assert told > count // 8


def assert_whole(disk: SimulatedDisk, slots: int) -> None:
    """What is there after an error is a commit, or nothing that is believed; and nothing is held."""
    try:
        store, contents = Store.open(FOLDERS, system=disk)
    except StorageError as error:
        if slots == 2:
            assert any(word in str(error) for word in ("no committed store", "is not a folder")), error  # noqa: PT017
            Store.create(FOLDERS, run="run", durable=SIZES, scratch={}, system=disk).close()
        return
    assert store.verify() == []
    number = contents["number"]
    for key, size in SIZES.items():
        written = number if key == "a" else min(number, 2)
        assert read(store, key, size) == bytes(content(size, written).numpy())
    store.close()


# On the real file system


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ESTALE, errno.ENOENT])
def test_a_folder_that_went_away_is_named_with_the_reason(tmp_path, code):
    system = FaultySystem()
    store = small_store(tmp_path, system=system)
    store.write("a", [content(BLOCK_BYTES, 1)]).wait()
    system.strike("open", fails(code), "manifest.json")
    with pytest.raises(StorageError) as caught:
        store.commit({})
    assert str(caught.value).startswith(f"cannot write {tmp_path / 'manifest.json'}: {os.strerror(code)}")
    more = {errno.EROFS: "turns read-only by itself", errno.ESTALE: "unmounted, or its server lost"}
    assert more.get(code, "") in str(caught.value)
    store.close()


def test_a_durable_write_that_fails_is_never_committed(tmp_path):
    values = committed_store(tmp_path, {"step": 1})
    system = FaultySystem()
    store, _ = Store.open([tmp_path], writable=True, system=system)
    store.reserve_scratch({"s": BLOCK_BYTES})
    system.strike("pwritev", fails(errno.EIO), "slot", times=1)
    store.write("a", [content(BLOCK_BYTES, 5)])  # its failure is noticed though nobody waits for it
    for action in (
        lambda: store.commit({"step": 2}),
        lambda: store.commit({"step": 2}),
        lambda: store.write("b", [content(3 * BLOCK_BYTES, 6)]),
    ):
        with pytest.raises(StorageError) as caught:
            action()
        assert str(caught.value) == (
            f"{tmp_path} takes no more writes, as a write failed: cannot write 4,096 bytes at byte 0 of "
            f"{tmp_path / 'slot0.bin'}: Input/output error"
        )
    store.revert(["a"])
    assert read(store, "a", BLOCK_BYTES) == values[0]
    with pytest.raises(StorageError, match="takes no more writes"):
        store.commit({"step": 2})
    store.write("s", [content(BLOCK_BYTES, 1)]).wait()
    store.close()
    store, contents = Store.open([tmp_path])
    assert (contents, store.verify()) == ({"step": 1}, [])
    store.close()


def test_a_failed_write_of_scratch_does_not_stop_commits(tmp_path):
    system = FaultySystem()
    store = small_store(tmp_path, system=system)
    system.strike("pwritev", fails(errno.EIO), "scratch.bin", times=1)
    with pytest.raises(StorageError, match=r"cannot write .*scratch\.bin: Input/output error"):
        store.write("s", [content(BLOCK_BYTES, 1)]).wait()
    store.write("a", [content(BLOCK_BYTES, 1)]).wait()
    store.commit({"step": 1})
    assert store.verify() == []
    store.close()


def test_a_store_of_one_slot_that_cannot_be_marked_is_not_written_to(tmp_path):
    values = committed_store(tmp_path, {"step": 1}, slots=1)
    system = FaultySystem()
    store, _ = Store.open([tmp_path], writable=True, system=system)
    system.strike("fsync", fails(errno.EIO), "manifest.json")
    for message in (r"cannot write .*manifest\.json: Input/output error", "takes no more writes, as a write failed"):
        with pytest.raises(StorageError, match=message):
            store.write("a", [content(BLOCK_BYTES, 5)])
    assert system.count("pwritev") == 0
    store.close()
    store, contents = Store.open([tmp_path])
    assert (contents, read(store, "a", BLOCK_BYTES)) == ({"step": 1}, values[0])
    store.close()


def test_a_read_only_disk_can_still_be_read(tmp_path):
    values = committed_store(tmp_path, {"step": 1})

    class ReadOnly(System):
        def open(self, path, flags):
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                fails(errno.EROFS)(None)
            return super().open(path, flags)

    store, contents = Store.open([tmp_path], system=ReadOnly())
    assert (contents, store.verify(), read(store, "a", BLOCK_BYTES)) == ({"step": 1}, [], values[0])
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
        Store.open([tmp_path], system=ReadOnly())
    store.close()
    with pytest.raises(StorageError, match=r"cannot write to the storage folder .*: Read-only file system"):
        Store.open([tmp_path], writable=True, system=ReadOnly())


def no_reserving(code: int) -> Callable[[Path], Store]:
    system = FaultySystem()
    system.strike("posix_fallocate", fails(code))
    return lambda folder: small_store(folder, durable={"a": BLOCK_BYTES, "b": 3 * BLOCK_BYTES}, system=system)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_where_disk_cannot_be_reserved_it_is_written(tmp_path, code):
    store = no_reserving(code)(tmp_path)
    for name, size in [("slot0.bin", 4), ("slot1.bin", 4), ("scratch.bin", 2)]:
        status = (tmp_path / name).stat()
        assert status.st_size == size * BLOCK_BYTES
        assert status.st_blocks * 512 >= size * BLOCK_BYTES
    store.commit({})
    assert store.verify() == []
    store.close()


def test_a_disk_that_refuses_a_later_direct_transfer_is_used_through_the_page_cache(tmp_path, caplog):
    system = FaultySystem()
    store = small_store(tmp_path, system=system)

    def refusing(real, descriptor, parts, offset):
        if refused:
            refused.pop()
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, parts, offset)

    refused = [1]
    system.strike("pwritev", refusing)
    with caplog.at_level(logging.WARNING, logger="greedysnake"):
        for key, seed, size in (("a", 1, 1), ("b", 2, 3)):
            store.write(key, [content(size * BLOCK_BYTES, seed)]).wait()
    assert len([record for record in caplog.records if "refuses direct I/O" in record.getMessage()]) == 1
    store.commit({})
    assert read(store, "b", 3 * BLOCK_BYTES) == bytes(content(3 * BLOCK_BYTES, 2).numpy())
    assert store.verify() == []
    store.close()


def test_short_transfers_that_end_within_a_block_go_on_at_its_beginning(tmp_path, caplog):
    def short(real, descriptor, parts, offset):
        if offset % BLOCK_BYTES:  # a disk that takes direct transfers in nothing less than blocks
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        moved = real(descriptor, [parts[0][: 2 * BLOCK_BYTES]], offset)
        return moved - 512 if moved > BLOCK_BYTES else moved

    system = FaultySystem()
    store = Store.create([tmp_path], run="run", durable={"a": 20 * BLOCK_BYTES}, scratch={}, system=system)
    system.strike("pwritev", short)
    system.strike("preadv", short)
    value = content(20 * BLOCK_BYTES, 1)
    store.write("a", [value]).wait()
    store.commit({})
    assert read(store, "a", 20 * BLOCK_BYTES) == bytes(value.numpy())
    assert store.verify() == []
    assert "refuses direct I/O" not in caplog.text
    store.close()


def test_two_writes_of_one_extent_never_meet(tmp_path):
    system = FaultySystem()
    store = small_store(tmp_path, system=system)
    begun = threading.Event()

    def slow(real, descriptor, parts, offset):
        begun.set()
        time.sleep(0.2)
        return real(descriptor, parts, offset)

    system.strike("pwritev", slow, times=1)
    first = store.write("a", [content(BLOCK_BYTES, 1)])
    assert begun.wait(10)
    store.write("a", [content(BLOCK_BYTES, 2)])
    store.commit({})
    first.wait()
    assert read(store, "a", BLOCK_BYTES) == bytes(content(BLOCK_BYTES, 2).numpy())
    assert store.verify() == []
    store.close()


def test_an_extent_in_more_parts_than_one_call_takes(tmp_path):
    system = FaultySystem()
    size = 1500 * BLOCK_BYTES
    store = Store.create([tmp_path], run="run", durable={"a": size}, scratch={}, system=system)
    value = content(size, 1)
    store.write("a", list(value.split(BLOCK_BYTES))).wait()
    store.commit({})
    assert system.count("pwritev", "slot1.bin") == 2
    assert read(store, "a", size) == bytes(value.numpy())
    assert store.verify() == []
    store.close()


def test_everything_goes_through_the_system_that_was_given(tmp_path):
    system = FaultySystem()
    folders = [tmp_path / "a", tmp_path / "b"]
    Store.create(folders, run="run", durable=SIZES, scratch={}, system=system).close()
    store = Store.create(folders, run="run", durable=SIZES, scratch={"s": BLOCK_BYTES}, system=system)
    store.write("a", [content(SIZES["a"], 1)]).wait()
    (folders[0] / "model").mkdir()
    (folders[0] / "model" / "config.json").write_text("{}")
    store.commit({})
    store.verify()
    store.close()
    assert system.count("fsync", "config.json") == 1  # what the owner put beside it lasts with the first commit
    assert system.count("fsync", "model") == 2
    remove_store(folders, system=system)
    assert not folders[0].exists()
    assert {name for name, _ in system.made} == {*CALLS} - {"drop_cache"}  # which is for buffered files
