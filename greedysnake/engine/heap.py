"""Memory that computation has freed and the C library keeps, given back before it adds to what is needed next.

The C library gives blocks of more than 32 MiB back to the kernel at once. Smaller ones stay in its heap, where the next
operation of the same kind finds them; but another kind of work needs blocks of other sizes, and takes new memory beside
what was kept. To give every block back at once would cost more: each page that is used again is a page fault. (With a
threshold of 1 MiB they took a fifth of a step of a model of 0.1 B parameters.)
"""

import ctypes

from greedysnake.plan.host import process_bytes
from greedysnake.schedule import Kind

_COMPUTING = frozenset({Kind.FORWARD, Kind.HEAD, Kind.LOSS, Kind.BACKWARD})


class HeapRoom:
    """Keeps a process within its planned memory, as far as what the C library keeps is to blame.

    Args:
        planned: bytes of host memory that the whole process is planned to take.
        head: bytes of them that the head takes while it computes, beside buffers and boundaries.
    """

    def __init__(self, planned: int, head: int) -> None:
        self._planned = planned
        self._head = head
        self._last: Kind | None = None

    def make(self, kind: Kind) -> None:
        """Before an operation: see that there is room for what it needs and the last one cannot have left."""
        if kind not in _COMPUTING:
            return
        needed = self._head if kind == Kind.HEAD and self._last != Kind.HEAD else 0
        self._last = kind
        if process_bytes() + needed > self._planned:
            trim_heap()


def trim_heap() -> bool:
    """Give freed memory that the C library keeps back to the kernel; False where it has no way to (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
