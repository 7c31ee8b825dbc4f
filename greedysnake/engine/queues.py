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

START_SECONDS = 1.0
"""How long a thread whose start was interrupted may take to begin and, as nothing may start any more, end."""


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
        ending: called with each operation when it is done, before any that waits for it starts.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        perform: Callable[[Operation], Transfer | None],
        *,
        enter_thread: Callable[[], None] = lambda: None,
        ending: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        self._operations = operations
        self._perform = perform
        self._enter_thread = enter_thread
        self._ending = ending
        self._lock = threading.RLock()  # an interrupted wait must not release a lock that another thread holds
        self._done = bytearray(len(operations))
        self._turns: list[threading.Condition] = []  # one a queue
        self._waiting: defaultdict[int, list[threading.Condition]] = defaultdict(list)
        self._limit = len(operations)  # operations from here on do not start
        self._in_flight = 0
        self._idle = threading.Condition(self._lock)
        self._failure: tuple[int | None, BaseException] | None = None
        self.spans: list[tuple[int, float, float]] = []  # operation, start and end, by time of ending

    def run(self) -> None:
        """Carry out all operations.

        Raises:
            BaseException: what an operation raised, with a note that names it, or what interrupted the run. No
                thread and no transfer is left behind.
        """
        queues: dict[Resource, list[Operation]] = defaultdict(list)
        for operation in self._operations:
            queues[operation.resource].append(operation)
        threads = []
        interruption = None
        try:
            for resource, queue in queues.items():
                if resource != Resource.COMPUTE:
                    ended = threading.Event()
                    name = f"greedysnake-{resource}"
                    threads.append((threading.Thread(target=self._work_alone, args=(queue, ended), name=name), ended))
                    threads[-1][0].start()
            self._work(queues[Resource.COMPUTE])
        except BaseException as error:
            interruption = error
        self._wait_for_end(threads, interruption)
        if self._failure is not None:
            index, failure = self._failure
            if index is not None:
                failure.add_note(f"while carrying out operation {self._operations[index]}")
            raise failure

    def _wait_for_end(
        self, threads: list[tuple[threading.Thread, threading.Event]], interruption: BaseException | None
    ) -> None:
        """Wait for the other resources and for all transfers; whatever interrupts that ends the run early."""
        while True:
            try:
                if interruption is not None:
                    self._fail(None, interruption)
                for thread, ended in threads:
                    # Not join alone: Python 3.11 takes a thread for ended when that is interrupted. A thread without
                    # identity never started, or its start was interrupted and it is about to begin.
                    if ended.wait(START_SECONDS if thread.ident is None else None):
                        thread.join()
                with self._lock:
                    while self._in_flight:
                        self._idle.wait()
                return
            except BaseException as error:
                interruption = error

    def _work_alone(self, queue: list[Operation], ended: threading.Event) -> None:
        try:
            self._enter_thread()
            self._work(queue)
        except BaseException as error:
            self._fail(None, error)
        finally:
            ended.set()

    def _work(self, queue: list[Operation]) -> None:
        turn = threading.Condition(self._lock)
        with self._lock:
            self._turns.append(turn)
        for operation in queue:
            try:
                if not self._wait_for_turn(operation, turn):
                    return
                start = time.perf_counter()
                transfer = self._perform(operation)
                if transfer is None:
                    self._finish(operation.index, start)
                else:
                    self._follow(operation.index, start, transfer)
            except BaseException as error:
                self._fail(operation.index, error)
                return

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
            try:
                if error is not None:
                    raise error
                self._finish(index, start)
            except BaseException as raised:
                self._fail(index, raised)
            finally:
                with self._lock:
                    self._in_flight -= 1
                    self._idle.notify_all()

        transfer.when_done(ended)

    def _finish(self, index: int, start: float) -> None:
        end = time.perf_counter()
        try:
            self._ending(self._operations[index])
        except BaseException as error:
            self._fail(index, error)
            return
        with self._lock:
            self._done[index] = 1
            self.spans.append((index, start, end))
            for turn in self._waiting.pop(index, ()):
                turn.notify()

    def _fail(self, index: int | None, error: BaseException) -> None:
        """Start nothing more: nothing at all, or nothing after ``index`` when the step ends in good order."""
        limit = index if isinstance(error, StepEndedError) and index is not None else -1
        with self._lock:
            if limit < self._limit:
                self._limit, self._failure = limit, (index, error)
            for turn in self._turns:
                turn.notify()
