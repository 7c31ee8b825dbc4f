"""The store on a real folder: two slots, crashes, scratch, and misuse."""

import json
import shutil
import signal
from collections import namedtuple

import pytest
import torch
from elsewhere import run_elsewhere
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import SLOTS, content, read, small_store

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, aligned_empty, round_up, store_bytes
from greedysnake.storage.geometry import STRIPE_BYTES

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
