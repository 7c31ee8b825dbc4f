"""What is said where nothing fits: what is proposed is enough, and what is not enough is not proposed."""

import re
from dataclasses import replace

import pytest
from made_up_machines import GIB, MACHINES, machine, query

from greedysnake.errors import GreedySnakeError
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.search import search

SMALL_DISK = machine(disks=[{**MACHINES["accelerator"].disks[0].model_dump(), "capacity": 7 * GIB}])


def message(asked: PlanQuery) -> str:
    with pytest.raises(GreedySnakeError) as caught:
        search(asked)
    return str(caught.value)


def test_a_second_slot_is_named_where_there_is_one():
    """0.5 B parameters of 12 bytes: 6 GiB once, 12 with the second slot."""
    text = message(query(SMALL_DISK))
    assert "engine.second_slot: false, with which it needs" in text
    assert "cannot then be resumed" in text
    one_slot = query(SMALL_DISK, second_slot=False)
    search(one_slot)  # is enough, and the need that was named is what it is
    smaller = machine(disks=[{**SMALL_DISK.disks[0].model_dump(), "capacity": GIB}])
    needed = re.search(r"with which it needs ([\d.]+ GiB)", message(query(smaller)))
    assert needed is not None
    assert f"needs at least {needed[1]}" in message(replace(one_slot, hardware=smaller))
    assert "second_slot" not in message(replace(one_slot, hardware=smaller))


def test_shorter_sequences_are_proposed_only_if_they_fit():
    long = query(machine(device_memory=876 * 2**20), rows=1, micro_batches=1)
    found = re.search(r"sequences of at most (\d+) tokens", message(long))
    assert found is not None
    search(replace(long, tokens=int(found[1])))
    assert "device memory: needs at least" in message(replace(long, tokens=int(found[1]) + 128))
    assert "sequences of" not in message(query(machine(device_memory=2**20)))  # no length would do


def test_smaller_batches_are_proposed_only_if_they_fit():
    asked = query(rows=16, micro_batches=4)
    found = re.search(r"a micro-batch size of at most (\d+)", message(asked))
    assert found is not None
    search(replace(asked, rows=int(found[1])))
    assert "device memory: needs at least" in message(replace(asked, rows=int(found[1]) + 1))
    assert "a number of micro-batches" not in message(asked)  # one of 16 sequences is too large already


def test_boundaries_that_must_stay_on_the_device_are_counted_there():
    """Anywhere else, 2 GiB would be enough."""
    asked = query(
        machine(device_memory=5 * GIB // 2), rows=1, micro_batches=64, group_size=64, boundaries_on_device=1.0
    )
    text = message(asked)
    assert "device memory: needs at least 3.38 GiB, may use 2.5 GiB" in text
    found = re.search(r"a number of micro-batches of at most (\d+)", text)
    assert found is not None
    enough = search(replace(asked, micro_batches=int(found[1])))  # though the program counts more, and finds no room
    assert enough.case.choices.boundaries_on_device == 1.0
