"""Page-aligned host memory, as direct I/O needs it."""

import mmap

import torch
from torch import Tensor

BLOCK_BYTES = 4096
"""Direct I/O moves whole blocks of this size, at file offsets and memory addresses that are multiples of it."""

_HUGE_PAGE_BYTES = 2 * 2**20


def round_up(count: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple


def aligned_empty(count: int) -> Tensor:
    """``count`` bytes of zeroed page-aligned memory as a uint8 tensor.

    The memory comes from the kernel, not from an allocator's heap, and goes back whole when the tensor
    (and every view of it) is gone.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    region = mmap.mmap(-1, round_up(count, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if count >= 2 * _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8, count=count)


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]
