"""Power that fails before any system call: the last commit is whole, or the one that was being made."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_disk import PowerFailure, SimulatedDisk
from stores import content, read

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store, remove_store

DURABLE = {"a": 2 * BLOCK_BYTES, "b": 3 * BLOCK_BYTES}
FIXED = {"f": BLOCK_BYTES, "g": 3 * BLOCK_BYTES}
SIZES = DURABLE | FIXED
STRIPE = BLOCK_BYTES

State = tuple[int, dict[str, bytes]]
"""Number of a commit, and what its extents hold."""

EMPTY: State = (0, {key: bytes(size) for key, size in DURABLE.items()})
"""Before the first commit; of what is written once, a state has what has been written."""


def folders_of(count: int) -> list[Path]:
    return [Path(f"/disk{i}/run") for i in range(count)]


def values(number: int, keys) -> dict[str, bytes]:
    return {key: bytes(content(SIZES[key], 100 * number + ord(key)).numpy()) for key in keys}


def new_store(disk: SimulatedDisk, folders: list[Path], slots: int) -> Store:
    return Store.create(
        folders,
        run="run",
        durable=DURABLE,
        fixed=FIXED,
        scratch={"s": BLOCK_BYTES},
        slots=slots,
        weights=[1] * len(folders),
        stripe_bytes=STRIPE,
        system=disk,
    )


def work(store: Store, state: State, steps: list[set[str]], made: list[State]) -> None:
    """Writes and commits; ``made`` gets every state that may be found from now on, the last first."""
    for wanted in steps:
        number, held = state
        number += 1
        keys = wanted - (FIXED.keys() & held.keys())  # these are there for good
        for key in sorted(keys):
            store.write(key, [content(SIZES[key], 100 * number + ord(key))]).wait()
        store.write("s", [content(BLOCK_BYTES, 0)])
        state = number, held | values(number, keys)
        made.insert(0, state)
        store.commit({"number": number, "there": sorted(state[1])})
        del made[1:]


def found_on(disk: SimulatedDisk, folders: list[Path]) -> State:
    store, contents = Store.open(folders, system=disk)
    assert store.verify() == []
    state = contents["number"], {key: read(store, key, SIZES[key]) for key in contents["there"]}
    store.close()
    return state


def problem_of(action: Callable[[], object]) -> str | None:
    """What an action complains about; "" if the power failed under it, None if it went well."""
    try:
        action()
    except PowerFailure:
        return ""
    except StorageError as error:
        return str(error)
    return None


@settings(max_examples=300, deadline=None)
@example(count=1, lives=[[set()], [set()]], seed=41070653, slots=2)  # killed between making a folder and flushing it
@given(
    count=st.integers(1, 3),
    lives=st.lists(st.lists(st.sets(st.sampled_from("abfg")), min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    slots=st.sampled_from([2, 2, 1]),
)
def test_a_kill_or_power_failure_at_any_call_leaves_a_commit_whole(count, lives, seed, slots):
    random, folders = Random(seed), folders_of(count)
    disk, state, possible = SimulatedDisk(), EMPTY, [EMPTY]
    for steps in lives:
        opened = []

        def live(disk=disk, state=state, steps=steps, possible=possible, opened=opened) -> None:
            if state == EMPTY:
                opened.append(new_store(disk, folders, slots))
            else:
                opened.append(Store.open(folders, writable=True, system=disk)[0])
                opened[0].reserve_scratch({"s": BLOCK_BYTES})
            possible[:] = [state]  # what a killed process had not made sure of is sure now
            work(opened[0], state, steps, possible)

        if random.random() < 0.9:
            disk.fail_at = disk.calls + random.randrange(1, 60 * (len(steps) + count))
        problem = problem_of(live)
        assert not problem or "a write failed" in problem  # as the power did
        disk.fail_at = 0
        for store in opened:
            store.close()
        off = random.random() < 0.5
        disk = disk.after_failure(random) if off else disk.after_kill()
        found = []
        problem = problem_of(lambda disk=disk, found=found: found.append(found_on(disk, folders)))
        if problem is None:
            state = found[0]
            assert state in possible
            if off:
                possible = [state]
        elif slots == 1 and "has one slot and was being written to" in problem:
            return
        else:
            assert re.search("no committed store|is not a folder", problem)
            assert EMPTY in possible
            state = EMPTY


@pytest.mark.parametrize("slots", [1, 2])
def test_power_that_fails_before_each_call_of_a_commit_and_of_the_life_after(slots):
    folders = folders_of(2)
    steps = [{"a", "b", "f"}, {"a", "g"}, {"b"}]
    whole = SimulatedDisk()
    store = new_store(whole, folders, slots)
    begun = whole.calls
    work(store, EMPTY, steps, [EMPTY])
    store.close()
    outcomes = set()
    for fail_at in range(begun, whole.calls + 1):
        for seed in range(2):
            disk = SimulatedDisk()
            store, possible = new_store(disk, folders, slots), [EMPTY]
            disk.fail_at = fail_at
            problem_of(lambda store=store, possible=possible: work(store, EMPTY, steps, possible))
            disk.fail_at = 0
            store.close()
            disk = disk.after_failure(Random(seed))
            found = []
            problem = problem_of(lambda disk=disk, found=found: found.append(found_on(disk, folders)))
            if problem is not None:
                dirty = slots == 1 and "has one slot and was being written to" in problem
                assert dirty or ("no committed store" in problem and possible[-1] == EMPTY)
                outcomes.add("dirty" if dirty else "none")
                continue
            assert found[0] in possible
            outcomes.add(found[0][0])
            store, _ = Store.open(folders, writable=True, system=disk)
            store.reserve_scratch({"s": BLOCK_BYTES})
            later = [found[0]]
            work(store, found[0], [{"a"}], later)
            store.close()
            assert found_on(disk, folders) == later[0]
    assert outcomes == {"none", 1, 2, 3} | ({"dirty"} if slots == 1 else set())


LOADED = ("f", "a", "b", "g")
"""Extents in the order in which they are filled, each only once, with a commit after each but the last."""


def load(store: Store, there: list[str]) -> None:
    """Fill what is not ``there`` yet, as a run's first weights are."""
    for done, key in enumerate(LOADED[len(there) :], len(there) + 1):
        store.write(key, [content(SIZES[key], 100 + ord(key))]).wait()
        if done < len(LOADED):
            store.commit({"there": LOADED[:done]})
    store.commit({"number": 1, "there": sorted(LOADED)})


def is_part(contents: dict) -> bool:
    return "number" not in contents


@pytest.mark.parametrize("slots", [1, 2])
def test_power_that_fails_before_each_call_of_a_load_loses_only_what_no_commit_names(slots):
    folders, whole = folders_of(2), SimulatedDisk()
    store = new_store(whole, folders, slots)
    begun = whole.calls
    load(store, [])
    store.close()
    outcomes, refused = set(), 0
    for fail_at in range(begun, whole.calls + 1):
        disk = SimulatedDisk()
        store = new_store(disk, folders, slots)
        disk.fail_at = fail_at
        problem_of(lambda store=store: load(store, []))
        disk.fail_at = 0
        store.close()
        disk = disk.after_failure(Random(fail_at))
        opened = []

        def reopen(disk=disk, opened=opened) -> None:
            opened.append(Store.open(folders, writable=True, accept_mixed=is_part, system=disk))

        problem = problem_of(reopen)
        if problem is not None:
            assert "no committed store" in problem
            outcomes.add(0)
            continue
        store, contents = opened[0]
        there = contents["there"]
        assert store.verify(keys=there) == []
        outcomes.add(len(there))
        store.reserve_scratch({"s": BLOCK_BYTES})
        store.close()
        problem = problem_of(lambda disk=disk: Store.open(folders, system=disk)[0].close())
        refused += "was being written to" in (problem or "")
        store, _ = Store.open(folders, writable=True, accept_mixed=is_part, system=disk)
        if len(there) < len(LOADED):
            load(store, there)
        store.close()
        assert found_on(disk, folders) == (1, values(1, SIZES))
    assert outcomes == {0, 1, 2, 3, 4}
    assert bool(refused) == (slots == 1)


@pytest.mark.parametrize("folders", [folders_of(1), folders_of(2)], ids=["one", "two"])
def test_a_commit_whose_process_was_killed_before_it_was_sure_lasts_once_the_next_run_writes(folders):
    disk, possible = SimulatedDisk(), [EMPTY]
    store = new_store(disk, folders, 2)
    work(store, EMPTY, [{"a", "b"}], possible)

    def kill(name: str, path: str) -> None:
        if name == "fsync" and path == str(folders[0]):
            raise PowerFailure

    disk.before = kill
    assert problem_of(lambda: work(store, possible[0], [{"a", "b"}], possible)) == ""
    disk.before, disk.fail_at = None, 0
    store.close()
    disk = disk.after_kill()
    store, contents = Store.open(folders, writable=True, system=disk)
    assert contents == {"number": 2, "there": ["a", "b"]}
    for key, size in SIZES.items():
        store.write(key, [content(size, 7)]).wait()
    disk.fail_at = 0
    store.close()
    for seed in range(20):
        assert found_on(disk.after_failure(Random(seed)), folders) == possible[0]


def test_a_store_in_folders_of_which_a_killed_process_made_some_lasts_with_its_first_commit():
    folders = [Path("/disk0/runs/one")]
    for seed in range(10):
        disk, made = SimulatedDisk(), [EMPTY]
        for folder in (Path("/disk0"), Path("/disk0/runs")):
            disk.mkdir(folder)
        disk = disk.after_kill()
        store = new_store(disk, folders, 2)
        work(store, EMPTY, [{"a"}], made)
        store.close()
        assert found_on(disk.after_failure(Random(seed)), folders) == made[0]


def test_power_that_fails_while_a_store_without_a_commit_is_replaced_leaves_folders_that_can_be_used():
    folders, fail_at, problem = folders_of(3), 0, ""
    while problem is not None:
        disk = SimulatedDisk()
        new_store(disk, folders, 2).close()
        disk.fail_at = disk.calls + fail_at
        made = []
        problem = problem_of(lambda disk=disk, made=made: made.append(new_store(disk, folders[::-1], 2)))
        assert not problem
        disk.fail_at = 0
        for store in made:
            store.close()
        for seed in range(3):
            new_store(disk.after_failure(Random(seed)), folders, 2).close()
        fail_at += 1
    assert fail_at > 50


@pytest.mark.parametrize("victim", [folder / "slot0.bin" for folder in folders_of(2)], ids=["first", "second"])
def test_a_flush_that_failed_is_not_made_again(victim):
    """Linux reports an error of write-back once, and a second flush of the same file succeeds with the data lost."""
    folders = folders_of(2)
    disk = SimulatedDisk()
    store, made = new_store(disk, folders, 2), [EMPTY]
    work(store, EMPTY, [{"a", "b"}], made)
    for key, size in SIZES.items():
        store.write(key, [content(size, 7)]).wait()
    flushes = []

    def fail_once(name: str, path: str) -> None:
        if name == "fsync" and path == str(victim):
            flushes.append(path)
            if len(flushes) == 1:
                disk.fail_flush(victim)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before = fail_once
    with pytest.raises(StorageError, match=f"cannot flush {victim}: Input/output error"):
        store.commit({"number": 2})
    for action in (lambda: store.commit({"number": 2}), lambda: store.write("a", [content(SIZES["a"], 8)])):
        with pytest.raises(StorageError, match="takes no more writes, as a commit failed: cannot flush"):
            action()
    store.close()
    assert len(flushes) == 1
    disk.before = None
    for seed in range(10):
        assert found_on(disk.after_failure(Random(seed)), folders) == made[0]


def test_disks_whose_blocks_are_larger_are_used_through_the_page_cache(caplog):
    disk, folders, made = SimulatedDisk(block=16384), folders_of(1), [EMPTY]
    store = new_store(disk, folders, 2)
    assert "refuses direct I/O" in caplog.text
    work(store, EMPTY, [{"a", "b"}, {"a"}], made)
    store.close()
    for seed in range(10):
        assert found_on(disk.after_failure(Random(seed)), folders) == made[0]


def test_power_that_fails_while_a_store_is_removed():
    folders, fail_at, problem = folders_of(2), 0, ""
    while problem is not None:
        disk, made = SimulatedDisk(), [EMPTY]
        store = new_store(disk, folders, 2)
        work(store, EMPTY, [{"a", "b"}], made)
        store.close()
        disk.fail_at = disk.calls + fail_at
        problem = problem_of(lambda disk=disk: remove_store(folders, system=disk))
        assert not problem
        disk.fail_at = 0
        after, found = disk.after_failure(Random(fail_at)), []
        told = problem_of(lambda after=after, found=found: found.append(found_on(after, folders)))
        assert found == made if told is None else re.search("no committed store|is not a folder", told)
        fail_at += 1
    assert fail_at > 20
    disk.fail_at = None
    assert disk.names(Path("/disk0")) == disk.names(Path("/disk1")) == []
