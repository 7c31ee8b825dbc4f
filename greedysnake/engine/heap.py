"""Memory that computation has freed and the C library keeps, given back before it adds to what is needed next.

The C library gives blocks of more than 32 MiB back to the kernel at once. Smaller ones stay in its heap, where the next
operation of the same kind finds them; but another kind of work needs blocks of other sizes, and takes new memory beside
what was kept. To give every block back at once would cost more: each page that is used again is a page fault. (With a
threshold of 1 MiB they took a fifth of a step of a model of 0.1 B parameters.)
"""

from greedysnake.plan.host import process_bytes, trim_heap
from greedysnake.schedule import Kind, Operation

_COMPUTING = frozenset({Kind.FORWARD, Kind.HEAD, Kind.LOSS, Kind.BACKWARD})


class HeapRoom:
    """Keeps a process within its planned memory, as far as what the C library keeps is to blame.

    Args:
        planned: bytes of host memory that the whole process is planned to take.
        computation: the part of them that torch takes while it computes: as a rule for logits, or for the gradient of
            embedding or head.
    """

    def __init__(self, planned: int, computation: int) -> None:
        self._planned = planned
        self._computation = computation
        self._last: tuple[Kind, bool] | None = None

    def make(self, operation: Operation) -> None:
        """Before an operation: see that there is room for what it needs and the last one cannot have left."""
        if operation.kind not in _COMPUTING:
            return
        work = (operation.kind, operation.unit == 0)
        large = operation.kind in (Kind.HEAD, Kind.LOSS) or work == (Kind.BACKWARD, True)
        needed = self._computation if large and work != self._last else 0
        self._last = work
        if process_bytes() + needed > self._planned:
            trim_heap()
