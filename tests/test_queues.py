"""Operations on one queue a resource: order, races, errors, interrupts, and nothing left behind."""

import faulthandler
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from queue_stage import Operations, Stage, chain, least_slots, predecessors, running_threads, schedules

from greedysnake.engine.queues import QueueRun, StepEndedError
from greedysnake.schedule import BUILDERS, Buffer, Operation, Resource, Tier
from greedysnake.storage import Transfer

HANG_S = 60


@pytest.fixture(scope="module")
def terminal(request) -> Iterator[int]:
    """Standard error as it was before pytest took it."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _hang_is_a_failure(terminal):
    """A deadlock ends the process with every thread's stack."""
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


def raising(error: BaseException, *, ahead: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Something that happens in an operation: ``ahead``, then the error."""

    def call() -> None:
        ahead()
        raise error

    return call


SEED = st.integers(0, 2**30)


def pick(data: st.DataObject, operations: Operations) -> Operation:
    assume(operations)
    resource = data.draw(st.sampled_from(sorted({operation.resource for operation in operations})))
    return data.draw(st.sampled_from([o for o in operations if o.resource == resource]))


def fail(data: st.DataObject, stage: Stage, index: int, call: Callable[[], None]) -> bool:
    """Let an operation fail at its start or in its transfer; whether at its start."""
    at_start = data.draw(st.booleans())
    (stage.at_start if at_start else stage.in_transfer)[index] = call
    return at_start


# Order


@settings(max_examples=100, deadline=None)
@given(schedules(), SEED)
def test_every_operation_is_carried_out_once_and_after_what_it_waits_for(operations, seed):
    stage = Stage(operations, seed)
    run = stage.run()
    assert sorted(stage.started()) == list(range(len(operations)))
    assert stage.ended() == set(range(len(operations)))
    assert sorted(index for what, index in stage.log if what == "told") == list(range(len(operations)))
    spans = {index: (start, end) for index, start, end in run.spans}
    assert len(run.spans) == len(spans) == len(operations)
    for operation in operations:
        assert spans[operation.index][0] <= spans[operation.index][1]
        assert all(spans[earlier][1] <= spans[operation.index][0] for earlier in operation.after)


@pytest.mark.parametrize("gradients", [Tier.HOST, Tier.SSD])
@pytest.mark.parametrize("on_ssd", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_the_least_slots_are_enough(name, on_ssd, gradients):
    for share, wait_for_norm in ((0.0, False), (0.4, False), (0.4, True), (1.0, True)):
        operations = least_slots(
            name, boundaries_on_ssd=on_ssd, gradients=gradients, delayed_share=share, wait_for_norm=wait_for_norm
        )
        for seed in range(2):
            stage = Stage(operations, seed)
            stage.run()
            assert len(stage.ended()) == len(operations)


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_what_shares_a_buffer_is_ordered_without_the_queues(operations):
    """A queue goes on while a transfer is under way, so its order alone does not keep two transfers apart."""
    before = predecessors(operations, queues=False)
    writer: dict[Buffer, int] = {}
    readers: defaultdict[Buffer, list[int]] = defaultdict(list)
    for operation in operations:
        needed = {writer[buffer] for buffer in (*operation.reads, *operation.writes) if buffer in writer}
        needed |= {reader for buffer in operation.writes for reader in readers[buffer]}
        assert all(before[operation.index] >> other & 1 for other in needed - {operation.index}), operation
        for buffer in operation.reads:
            readers[buffer].append(operation.index)
        for buffer in operation.writes:
            writer[buffer], readers[buffer] = operation.index, []


def test_no_operations_at_all():
    assert Stage((), 0).run().spans == []


# Errors


@settings(max_examples=100, deadline=None)
@given(schedules(), SEED, st.data())
def test_an_error_anywhere_ends_the_run(operations, seed, data):
    stage = Stage(operations, seed)
    broken = pick(data, operations)
    error = data.draw(st.sampled_from([OSError("broken"), ValueError("broken"), KeyboardInterrupt()]))
    at_start = fail(data, stage, broken.index, raising(error))
    with pytest.raises(type(error)) as caught:
        stage.run()
    assert caught.value is error
    assert error.__notes__ == [f"while carrying out operation {broken}"]
    assert broken.index not in stage.ended()
    waiting = predecessors(operations, queues=False)
    for index in stage.started():
        assert not waiting[index] >> broken.index & 1
        if at_start and operations[index].resource == broken.resource:
            assert index <= broken.index


def test_after_an_error_nothing_else_starts():
    ready = [(Resource.CPU, ())] * 1000
    operations = chain((Resource.SSD_READ, ()), *ready, (Resource.COMPUTE, (1000,)))
    stage = Stage(operations, 1)
    stage.at_start[0] = raising(OSError("broken"), ahead=lambda: time.sleep(0.005))
    with pytest.raises(OSError, match="broken"):
        stage.run()
    assert len(stage.started()) < 1000


@settings(max_examples=100, deadline=None)
@given(schedules(), SEED, st.data())
def test_a_step_that_ends_early_does_all_that_comes_before(operations, seed, data):
    stage = Stage(operations, seed)
    last = pick(data, operations)
    at_start = fail(data, stage, last.index, raising(StepEndedError("enough")))
    with pytest.raises(StepEndedError) as caught:
        stage.run()
    assert caught.value.__notes__ == [f"while carrying out operation {last}"]
    assert stage.ended().issuperset(range(last.index))
    assert last.index not in stage.ended()
    waiting = predecessors(operations, queues=at_start)
    assert not [index for index in stage.started() if waiting[index] >> last.index & 1]


def test_after_an_early_end_nothing_that_comes_later_starts():
    raised = threading.Event()
    operations = chain(
        (Resource.CPU, ()),  # ends long after the step has ended
        (Resource.SSD_READ, (0,)),
        (Resource.COMPUTE, ()),  # ends the step
        (Resource.SSD_WRITE, (0,)),
        (Resource.CPU, (0,)),
        (Resource.SSD_READ, (1,)),
    )
    stage = Stage(operations, 1)
    stage.at_start[0] = lambda: (raised.wait(10), time.sleep(0.2))
    stage.at_start[2] = raising(StepEndedError("enough"), ahead=raised.set)
    with pytest.raises(StepEndedError):
        stage.run()
    assert stage.started() in ([0, 2, 1], [2, 0, 1])
    assert stage.ended() == {0, 1}


def test_of_two_early_ends_the_first_in_the_schedule_counts():
    raised = threading.Event()
    operations = chain((Resource.CPU, ()), (Resource.COMPUTE, ()), (Resource.SSD_READ, ()))
    for first in (0, 1):
        raised.clear()
        stage = Stage(operations, 1)
        errors = [StepEndedError("0"), StepEndedError("1")]
        stage.at_start[first] = raising(errors[first], ahead=raised.set)
        stage.at_start[1 - first] = raising(errors[1 - first], ahead=lambda: (raised.wait(10), time.sleep(0.05)))
        with pytest.raises(StepEndedError) as caught:
            stage.run()
        assert caught.value is errors[0]


def unordered(operations: Operations, data: st.DataObject) -> tuple[int, int]:
    """Two operations, in order of the schedule, that can be under way at the same time."""
    before = predecessors(operations, queues=True)
    second = data.draw(st.sampled_from(operations)).index if operations else 0
    free = [first for first in range(second) if not before[second] >> first & 1]
    assume(free)
    return data.draw(st.sampled_from(free)), second


@settings(max_examples=80, deadline=None)
@given(schedules(), SEED, st.data())
def test_an_error_while_the_step_ends_early_wins(operations, seed, data):
    stage = Stage(operations, seed)
    broken, last = unordered(operations, data)
    raised, error = threading.Event(), OSError("broken")
    fail(data, stage, broken, raising(error, ahead=lambda: raised.wait(10)))
    stage.at_start[last] = raising(StepEndedError("enough"), ahead=raised.set)
    with pytest.raises(OSError, match="broken") as caught:
        stage.run()
    assert caught.value is error
    assert error.__notes__ == [f"while carrying out operation {operations[broken]}"]


@settings(max_examples=80, deadline=None)
@given(schedules(), SEED, st.data())
def test_of_two_errors_at_once_one_is_raised(operations, seed, data):
    stage = Stage(operations, seed)
    both = unordered(operations, data)
    together = threading.Barrier(2)
    errors = [OSError("one"), ValueError("two")]
    for index, error in zip(both, errors, strict=True):
        stage.at_start[index] = raising(error, ahead=lambda: together.wait(10))
    with pytest.raises((OSError, ValueError)) as caught:
        stage.run()
    assert caught.value in errors
    assert len(caught.value.__notes__) == 1


# Threads that cannot work


def test_an_error_on_entering_a_thread_ends_the_run():
    operations = chain((Resource.CPU, ()), (Resource.SSD_READ, ()), (Resource.COMPUTE, (0, 1)))
    before = running_threads()

    def enter() -> None:
        if threading.current_thread().name.endswith("ssd_read"):
            raise RuntimeError("no entry")

    with pytest.raises(RuntimeError, match="no entry"):
        QueueRun(operations, lambda operation: None, enter_thread=enter).run()
    assert running_threads() == before


def test_a_system_without_threads_left(monkeypatch):
    operations = chain((Resource.COMPUTE, ()), (Resource.CPU, (0,)), (Resource.SSD_READ, (1,)))
    before = running_threads()
    original, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        QueueRun(operations, lambda operation: None).run()
    assert running_threads() == before


@pytest.mark.parametrize("transfer", [None, Transfer([])])
@pytest.mark.parametrize("resource", [Resource.CPU, Resource.COMPUTE])
def test_an_error_on_ending_an_operation_ends_the_run(resource, transfer):
    def end(operation: Operation) -> None:
        if operation.index == 1:
            raise RuntimeError("no end")

    started = []
    operations = chain((Resource.SSD_READ, ()), (resource, (0,)), (Resource.SSD_WRITE, (1,)), (Resource.COMPUTE, (2,)))
    run = QueueRun(operations, lambda operation: started.append(operation.index) or transfer, ending=end)
    with pytest.raises(RuntimeError, match="no end") as caught:
        run.run()
    assert caught.value.__notes__ == ["while carrying out operation 1: update unit 1"]
    assert started == [0, 1]


# Interrupts


@pytest.fixture
def _interrupts():
    """SIGINT raises KeyboardInterrupt in the main thread, which must be the one that runs the tests."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("the tests do not run in the main thread")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(seconds: tuple[float, ...]) -> None:
    """Control-C, once after each time; then some more work."""
    for pause in seconds:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.002)


@pytest.mark.usefixtures("_interrupts")
@settings(max_examples=100, deadline=None)
@given(schedules(), SEED, st.data())
def test_an_interrupt_at_any_time_ends_the_run(operations, seed, data):
    stage = Stage(operations, seed)
    at = pick(data, operations)
    times = data.draw(st.lists(st.sampled_from([0.0, 1e-5, 1e-4, 1e-3]), min_size=1, max_size=3))
    fail(data, stage, at.index, lambda: interrupt(tuple(times)))
    with pytest.raises(KeyboardInterrupt):
        stage.run()
    waiting = predecessors(operations, queues=False)
    if at.resource == Resource.COMPUTE and at.index in stage.at_start:
        assert not [index for index in stage.started() if waiting[index] >> at.index & 1]


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("waiting", ["for a turn", "for threads", "for transfers"])
def test_an_interrupt_while_waiting_waits_for_what_is_under_way(waiting):
    after = [(Resource.COMPUTE, (0,))] if waiting == "for a turn" else []
    stage = Stage(chain((Resource.SSD_READ, ()), (Resource.CPU, (0,)), (Resource.SSD_WRITE, (1,)), *after), 1)

    def work() -> None:
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

    (stage.in_transfer if waiting == "for transfers" else stage.at_start)[0] = work
    with pytest.raises(KeyboardInterrupt):
        stage.run()
    assert stage.started() == [0]
