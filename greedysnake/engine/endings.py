"""Notices when the content of a buffer is over, while operations end in any order."""

import threading
from collections import defaultdict
from collections.abc import Callable

from greedysnake.schedule import Buffer, Life, Operation, Schedule, content_lives


class ContentEndings:
    """Tells when the content of a buffer is over: when all operations that touch it have ended.

    Args:
        schedule: what runs.
        over: called with the buffer and the operation that made the content.
    """

    def __init__(self, schedule: Schedule, over: Callable[[Buffer, Operation], None]) -> None:
        self._operations = schedule.operations
        self._over = over
        self._lock = threading.Lock()
        self._lives: defaultdict[int, list[tuple[Life, int]]] = defaultdict(list)  # with their writers
        self._left: dict[Life, int] = {}
        for life in content_lives(schedule):
            if life.writer is not None and life.released:
                self._left[life] = len(life.uses)
                for index in life.uses:
                    self._lives[index].append((life, life.writer))

    def ended(self, operation: Operation) -> None:
        """Count an operation that has ended."""
        for life, writer in self._lives.get(operation.index, ()):
            with self._lock:
                self._left[life] -= 1
                over = not self._left[life]
            if over:
                self._over(life.buffer, self._operations[writer])
