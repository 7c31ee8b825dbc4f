"""What the C library keeps of freed memory goes back to the kernel where the plan would be exceeded."""

import ctypes
import subprocess
import sys

import pytest

MIB = 2**20
HAS_TRIM = hasattr(ctypes.CDLL(None), "malloc_trim")

KEEPING = """
import sys
import torch
from greedysnake.engine.heap import HeapRoom
from greedysnake.plan.host import process_bytes
from greedysnake.schedule import Kind, Operation, Resource
torch.ones(16 * 2**20, dtype=torch.uint8)  # freed: from now on blocks of up to this size come from the heap
blocks, last = [], []
for _ in range(12):
    blocks.append(torch.ones(8 * 2**20, dtype=torch.uint8))
last.append(torch.ones(2**20, dtype=torch.uint8))  # above them, so that the heap cannot shrink
full = process_bytes()
del blocks
seen = [full, process_bytes()]
room = HeapRoom(planned=full, computation=64 * 2**20)
large = (Kind(sys.argv[1]), int(sys.argv[2]))
for kind, unit in ((Kind.FORWARD, 1), (Kind.BACKWARD, 1), (Kind.ZERO_GRADIENT, 0), large):
    room.make(Operation(index=0, kind=kind, resource=Resource.COMPUTE, unit=unit))
    seen.append(process_bytes())
print(*seen)
"""


@pytest.mark.skipif(not HAS_TRIM, reason="this C library cannot be told to give memory back")
@pytest.mark.parametrize(("kind", "unit"), [("head", 2), ("backward", 0)])
def test_kept_memory_is_given_back_before_what_needs_most_and_not_before(kind, unit):
    command = [sys.executable, "-c", KEEPING, kind, str(unit)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    full, freed, *within, large = map(int, found.stdout.split())
    assert full - freed < 32 * MIB  # the C library kept it
    assert within == pytest.approx([freed] * 3, abs=8 * MIB)  # which is within the plan
    assert large < full - 64 * MIB  # but not with what is needed beside it
