"""Bits that changed on the disk: every one is found, and named."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from faulty_system import FaultySystem, fails
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import content, read

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, System, aligned_empty
from greedysnake.storage.small_files import is_sealed, sealed

SIZES = {"first": 3 * BLOCK_BYTES, "second": 8 * BLOCK_BYTES, "third": BLOCK_BYTES, "never": 5 * BLOCK_BYTES}
STRIPE = 2 * BLOCK_BYTES


def make_store(folders: list[Path], **options) -> Store:
    """Committed twice, so that what is committed lies in both slots; one extent was never written."""
    store = Store.create(folders, run="run", durable=SIZES, scratch={}, stripe_bytes=STRIPE, **options)
    for number, keys in enumerate([("first", "second", "third"), ("second",)]):
        for key in keys:
            store.write(key, [content(SIZES[key], number)]).wait()
        store.commit({"number": number})
    return store


def flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1 << bit]))
        os.fsync(file.fileno())


@pytest.fixture(scope="module", params=[[1], [1, 1], [3, 1, 2]], ids=["one", "two", "three"])
def folders(request, tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("store")
    found = [base / f"disk{i}" for i in range(len(request.param))]
    make_store(found, weights=request.param).close()
    return found


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_found_and_its_extent_named(folders, data):
    flips = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(folders) - 1), st.integers(0, 1), st.floats(0, 1), st.integers(0, 7)),
            min_size=1,
            max_size=3,
        )
    )
    store, _ = Store.open(folders)
    places = {}  # of committed bytes: slot, folder and range, by extent
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    start = 0
    for (key, size), slot in zip(manifest["extents"], manifest["slots"], strict=True):
        for piece in store.geometry.pieces(start, size):
            places[slot, piece.folder, piece.offset, piece.length] = key
        start += size
    done, expected = [], set()
    for folder, slot, where, bit in flips:
        path = folders[folder] / f"slot{slot}.bin"
        at = int(where * (path.stat().st_size - 1))
        if (path, at, bit) in done:
            continue
        flip(path, at, bit)
        done.append((path, at, bit))
        for (own_slot, own_folder, offset, length), key in places.items():
            if (own_slot, own_folder) == (slot, folder) and offset <= at < offset + length:
                expected.add((path, offset, length, key))
    try:
        found = store.verify()
        assert {(one.path, one.offset, one.length, one.key) for one in found} == expected
        assert len(found) == len(expected)
        for one in found:
            assert str(one).startswith(f"{one.path}, bytes {one.offset:,} to {one.offset + one.length:,}, part of ")
            assert "its checksum is" in one.reason
    finally:
        for path, at, bit in done:
            flip(path, at, bit)
    assert store.verify() == []
    store.close()


def test_every_flipped_bit_of_a_manifest_is_found(folders):
    path = folders[0] / "manifest.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at * 5 % 8]) + whole[at + 1 :])
        with pytest.raises(StorageError) as caught:
            Store.open(folders, writable=True)
        assert str(path) in str(caught.value)
    for count in range(0, len(whole), 7):
        path.write_bytes(whole[:count])
        with pytest.raises(StorageError, match=r"manifest\.json"):
            Store.open(folders)
    path.write_bytes(whole)
    Store.open(folders)[0].close()


@given(
    values=st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.floats(allow_nan=False), min_size=1),
    data=st.data(),
)
def test_a_seal_breaks_with_any_bit(values, data):
    whole = sealed(json.dumps(values).encode())
    assert {key: value for key, value in json.loads(whole).items() if key != "crc32c"} == {
        key: value for key, value in values.items() if key != "crc32c"
    }
    assert is_sealed(whole)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    assert not is_sealed(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
    assert not is_sealed(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_a_place_that_cannot_be_read_is_damage_too(tmp_path):
    system = FaultySystem()
    store = make_store([tmp_path], system=system)
    system.strike("preadv", fails(errno.EIO), "slot1.bin", times=1)
    found = store.verify()
    assert len(found) == 1
    assert found[0].path == tmp_path / "slot1.bin"
    assert found[0].reason.endswith("Input/output error")
    assert store.verify() == []
    store.close()


def test_verifying_goes_on_beside_writes_and_tells_how_far_it_is(tmp_path):
    store = make_store([tmp_path])
    told, total = [], sum(SIZES.values())

    def progress(done: int, of: int) -> None:
        told.append((done, of))
        store.write("second", [content(SIZES["second"], len(told))]).wait()

    assert store.verify(progress) == []
    assert [of for _, of in told] == [total] * len(told)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == total
    store.close()


class Watched(System):
    """Notes where in memory reads go."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()

    def preadv(self, descriptor, into, offset):
        self.addresses.add(np.frombuffer(into[0], np.uint8).ctypes.data)
        return super().preadv(descriptor, into, offset)


def test_verifying_takes_little_memory(tmp_path):
    system = Watched()
    store = Store.create([tmp_path], run="run", durable={"a": 200 * 2**20}, scratch={}, system=system)
    store.commit({})
    system.addresses.clear()
    assert store.verify() == []
    assert 2 <= len(system.addresses) <= 8  # of 8 MiB each
    store.close()


def test_checksums_follow_what_is_written_reverted_and_written_again(tmp_path):
    store = make_store([tmp_path])
    for number in range(5):
        store.write("first", [content(SIZES["first"], 10 + number)]).wait()
        if number % 2:
            store.revert(["first"])
        store.commit({})
        assert store.verify() == []
    one = content(SIZES["first"], 99)
    for _ in range(3):  # the same place at once: what is committed is one of them, whole
        store.write("first", [content(SIZES["first"], 98)])
        store.write("first", [one])
    store.commit({})
    assert store.verify() == []
    assert read(store, "first", SIZES["first"]) == bytes(one.numpy())
    store.close()


def test_memory_that_changes_while_it_is_written_is_found(tmp_path):
    """A checksum is of what was given; bytes that change on their way to the disk do not match it."""
    system = FaultySystem()
    store = make_store([tmp_path], system=system)
    value = aligned_empty(SIZES["third"])

    def changed(real, descriptor, parts, offset):
        value[17] ^= 4
        return real(descriptor, parts, offset)

    system.strike("pwritev", changed, times=1)
    store.write("third", [value]).wait()
    store.commit({})
    assert [one.key for one in store.verify()] == ["third"]
    store.close()
