"""Runs operations on one queue a resource, each as soon as what it waits for has ended.

No deadlock is possible: an operation waits only for operations before it in the schedule, and every queue
is in the order of the schedule. So the first operation that has not ended is at the head of its queue, and
everything that it waits for has ended.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from greedysnake.schedule import Operation, Resource
from greedysnake.storage import Transfer


class StepEndedError(Exception):
    """Raised by an operation to end the step early, in good order.

    What comes before it in the schedule is still carried out; what comes after it is not.
    """


class QueueRun:
    """One run over a list of operations. Compute runs in the calling thread, every other resource in its own.

    Args:
        operations: in schedule order, each waiting only for earlier ones.
        perform: carries out an operation; gives a transfer if it goes on after returning.
        enter_thread: called first in each resource's own thread.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        perform: Callable[[Operation], Transfer | None],
        enter_thread: Callable[[], None],
    ) -> None:
        self._operations = operations
        self._perform = perform
        self._enter_thread = enter_thread
        self._lock = threading.Lock()
        self._done = bytearray(len(operations))
        self._waiting: defaultdict[int, list[threading.Condition]] = defaultdict(list)
        self._limit = len(operations)  # operations from here on do not start
        self._in_flight = 0
        self._idle = threading.Condition(self._lock)
        self._failure: tuple[int, BaseException] | None = None
        self.spans: list[tuple[int, float, float]] = []  # operation, start and end, by time of ending

    def run(self) -> None:
        """Carry out all operations.

        Raises:
            BaseException: what an operation raised, with a note that names it. No thread and no transfer
                is left behind.
        """
        queues: dict[Resource, list[Operation]] = defaultdict(list)
        for operation in self._operations:
            queues[operation.resource].append(operation)
        threads = [
            threading.Thread(target=self._work_alone, args=(queue,), name=f"greedysnake-{resource}")
            for resource, queue in queues.items()
            if resource != Resource.COMPUTE
        ]
        for thread in threads:
            thread.start()
        self._work(queues[Resource.COMPUTE])
        self._join(threads)
        if self._failure is not None:
            index, error = self._failure
            error.add_note(f"while carrying out operation {self._operations[index]}")
            raise error

    def _join(self, threads: list[threading.Thread]) -> None:
        """Wait for the other resources; an interrupt while waiting ends the step like any other failure."""
        while True:
            try:
                for thread in threads:
                    thread.join()
                with self._lock:
                    while self._in_flight:
                        self._idle.wait()
                return
            except KeyboardInterrupt as error:
                self._fail(0, error)

    def _work_alone(self, queue: list[Operation]) -> None:
        self._enter_thread()
        self._work(queue)

    def _work(self, queue: list[Operation]) -> None:
        turn = threading.Condition(self._lock)
        for operation in queue:
            try:
                if not self._wait_for_turn(operation, turn):
                    return
                start = time.perf_counter()
                transfer = self._perform(operation)
            except BaseException as error:
                self._fail(operation.index, error)
                return
            if transfer is None:
                self._finish(operation.index, start)
            else:
                self._follow(operation.index, start, transfer)

    def _wait_for_turn(self, operation: Operation, turn: threading.Condition) -> bool:
        """Wait until the operation may start; whether it may at all."""
        with self._lock:
            for earlier in operation.after:
                while not self._done[earlier] and operation.index < self._limit:
                    self._waiting[earlier].append(turn)
                    turn.wait()
            return operation.index < self._limit

    def _follow(self, index: int, start: float, transfer: Transfer) -> None:
        """Let the queue go on while a transfer is under way."""
        with self._lock:
            self._in_flight += 1

        def ended(error: BaseException | None) -> None:
            if error is None:
                self._finish(index, start)
            else:
                self._fail(index, error)
            with self._lock:
                self._in_flight -= 1
                self._idle.notify_all()

        transfer.when_done(ended)

    def _finish(self, index: int, start: float) -> None:
        end = time.perf_counter()
        with self._lock:
            self._done[index] = 1
            self.spans.append((index, start, end))
            for turn in self._waiting.pop(index, ()):
                turn.notify()

    def _fail(self, index: int, error: BaseException) -> None:
        """Start nothing more: nothing at all, or nothing after ``index`` when the step ends in good order."""
        with self._lock:
            in_order = isinstance(error, StepEndedError)
            self._limit = min(self._limit, index if in_order else 0)
            if self._failure is None or (isinstance(self._failure[1], StepEndedError) and not in_order):
                self._failure = (index, error)
            for turns in self._waiting.values():
                for turn in turns:
                    turn.notify()
            self._waiting.clear()
