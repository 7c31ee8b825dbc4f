"""Schedules of every kind, and a stage on which queues carry them out."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hypothesis import strategies as st

from greedysnake.engine.queues import QueueRun
from greedysnake.schedule import (
    BUILDERS,
    Buffer,
    Choices,
    ChunkShape,
    Kind,
    Operation,
    Resource,
    StepShape,
    Tier,
    UnitShape,
    build_evaluation,
    build_flush,
)
from greedysnake.storage import Transfer

MOVERS = ThreadPoolExecutor(3, thread_name_prefix="mover")

Operations = tuple[Operation, ...]


# Schedules


@st.composite
def schedules(draw: st.DrawFn) -> Operations:
    """Operations of any step, evaluation or flush of a small model."""
    chunk = ChunkShape(weight_bytes=2, state_bytes=10, gradient_bytes=4)

    def unit(least: int, *, needs_weights: bool = True) -> UnitShape:
        return UnitShape(chunks=(chunk,) * draw(st.integers(least, 3)), backward_needs_weights=needs_weights)

    shape = StepShape(
        units=(unit(1, needs_weights=draw(st.booleans())), *(unit(1) for _ in range(draw(st.integers(1, 4)))), unit(0)),
        micro_batches=draw(st.integers(1, 3)),
        boundary_bytes=8,
        tied=draw(st.booleans()),
    )
    slots = st.integers(1, 3)
    choices = Choices(
        delayed_share=draw(st.sampled_from([0.0, 0.4, 1.0])),
        wait_for_norm=draw(st.booleans()),
        boundaries_on_ssd=draw(st.sampled_from([0.0, 0.5, 1.0])),
        gradients=draw(st.sampled_from([Tier.HOST, Tier.SSD])),
        weight_slots=draw(slots),
        gradient_slots=draw(slots),
        state_slots=draw(slots),
    )
    name = draw(st.sampled_from([*sorted(BUILDERS), *sorted(BUILDERS), "flush", "evaluation"]))
    if name == "flush":
        return build_flush(shape, choices).operations
    if name == "evaluation":
        return build_evaluation(shape, choices).operations
    return BUILDERS[name](shape, choices, pending=draw(st.booleans())).operations


def least_slots(name: str, **choices) -> Operations:
    """A step with one slot in each pool where one is enough."""
    chunk = ChunkShape(weight_bytes=2, state_bytes=10, gradient_bytes=4)
    shape = StepShape(units=(UnitShape(chunks=(chunk,) * 3),) * 5, micro_batches=3, boundary_bytes=8, tied=True)
    settings = Choices(weight_slots=1, gradient_slots=1, state_slots=1, **choices)
    return BUILDERS[name](shape, settings, pending=True).operations


def chain(*links: tuple[Resource, tuple[int, ...]]) -> Operations:
    """Operations by hand: each one's resource and what it waits for."""
    return tuple(
        Operation(index=index, kind=Kind.UPDATE, resource=resource, unit=index, after=after)
        for index, (resource, after) in enumerate(links)
    )


def predecessors(operations: Operations, *, queues: bool) -> list[int]:
    """Bit set of the operations that have ended when each one starts; ``queues``: that have at least started."""
    found: list[int] = []
    latest: dict[Resource, int] = {}
    for operation in operations:
        before = list(operation.after)
        if queues and operation.resource in latest:
            before.append(latest[operation.resource])
        latest[operation.resource] = operation.index
        mask = 0
        for earlier in before:
            mask |= found[earlier] | 1 << earlier
        found.append(mask)
    return found


# Carrying out


class Stage:
    """Carries out operations by sleeping a little, some of them as transfers that end on other threads.

    Attributes:
        log: what started, ended or failed, and what the run was told of, in order: ("start", "end", "failed" or
            "told", operation).
        races: pairs of operations that touched a buffer at the same time, one of them writing.
        at_start, in_transfer: what else an operation does, by its index, before it is carried out or within its
            transfer.
    """

    def __init__(self, operations: Operations, seed: int) -> None:
        self.operations = operations
        self.log: list[tuple[str, int]] = []
        self.threads: dict[int, int] = {}
        self.races: list[tuple[int, int, Buffer]] = []
        self.at_start: dict[int, Callable[[], None]] = {}
        self.in_transfer: dict[int, Callable[[], None]] = {}
        self._active: set[int] = set()
        self._seed = seed
        self._lock = threading.Lock()

    def run(self) -> QueueRun:
        """Run all; whatever happens, nothing may be left behind."""
        before = running_threads()
        run = QueueRun(self.operations, self.perform, ending=self._told)
        try:
            run.run()
        finally:
            assert running_threads() == before
            assert not self._active
            assert not self.races
            self._check_order()
            known = len(self.log)
            time.sleep(0.001)
            assert len(self.log) == known
        return run

    def perform(self, operation: Operation) -> Transfer | None:
        chance = random.Random(self._seed * 100_003 + operation.index)
        self._begin(operation)
        index = operation.index
        pieces = chance.choice([None, None, 0, 1, 3]) if index not in self.in_transfer else chance.choice([1, 3])
        try:
            if index in self.at_start:
                self.at_start[index]()
            _sleep(chance)
        except BaseException:
            self._end(index, "failed")
            raise
        if not pieces:
            self._end(index, "end")
            return None if pieces is None else Transfer([])
        left = [pieces]
        failed: list[bool] = []

        def move(piece: int, seconds: random.Random) -> None:
            moved = False
            try:
                _sleep(seconds)
                if piece == 0 and index in self.in_transfer:
                    self.in_transfer[index]()
                moved = True
            finally:
                with self._lock:
                    left[0] -= 1
                    failed.append(not moved)
                    last = left[0] == 0
                if last:
                    self._end(index, "failed" if any(failed) else "end")

        return Transfer([MOVERS.submit(move, piece, random.Random(chance.random())) for piece in range(pieces)])

    def _begin(self, operation: Operation) -> None:
        with self._lock:
            for other in self._active:
                theirs = self.operations[other]
                both = {*operation.writes} & {*theirs.reads, *theirs.writes} | {*operation.reads} & {*theirs.writes}
                self.races += [(other, operation.index, buffer) for buffer in both]
            self._active.add(operation.index)
            self.log.append(("start", operation.index))
            self.threads[operation.index] = threading.get_ident()

    def _end(self, index: int, what: str) -> None:
        with self._lock:
            self._active.remove(index)
            self.log.append((what, index))

    def _told(self, operation: Operation) -> None:
        with self._lock:
            self.log.append(("told", operation.index))

    def started(self) -> list[int]:
        return [index for what, index in self.log if what == "start"]

    def ended(self) -> set[int]:
        return {index for what, index in self.log if what == "end"}

    def _check_order(self) -> None:
        """No operation twice or before what it waits for; each resource's in the order of the schedule."""
        ended, told = set(), []
        started: defaultdict[Resource, list[int]] = defaultdict(list)
        for what, index in self.log:
            operation = self.operations[index]
            if what == "start":
                assert set(told).issuperset(operation.after), operation
                started[operation.resource].append(index)
            elif what == "end":
                ended.add(index)
            elif what == "told":
                assert index in ended, operation
                told.append(index)
        assert len(set(told)) == len(told)
        for resource, indices in started.items():
            assert indices == [o.index for o in self.operations if o.resource == resource][: len(indices)]
        own = {self.threads[index] for index in started[Resource.COMPUTE]}
        assert own <= {threading.get_ident()}
        assert len({self.threads[index] for index in self.started()}) <= len(started)


def _sleep(chance: random.Random) -> None:
    if chance.random() < 0.3:
        time.sleep(chance.random() * 3e-4)


def running_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith("mover")}
