"""The simulator: by hand on small schedules, and by what must hold of any schedule."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.plan.costs import Contention, DiskRates, StepCosts, UnitSeconds
from greedysnake.plan.simulate import simulate
from greedysnake.plan.step_costs import least_seconds
from greedysnake.schedule import (
    BUILDERS,
    Buffer,
    Choices,
    ChunkShape,
    Kind,
    Operation,
    Pool,
    Resource,
    Schedule,
    StepShape,
    Tier,
    UnitShape,
    check_schedule,
    one_by_one,
)

DISK = DiskRates(read=100.0, write=50.0, mixed_read=60.0, mixed_write=25.0)


def costs(count: int = 3, **changes: object) -> StepCosts:
    plain = StepCosts(
        disk=DISK,
        h2d=200.0,
        d2h=100.0,
        copy=400.0,
        device_fill=1000.0,
        optimizer=40.0,
        units=(UnitSeconds(forward=1.0, backward=3.0),) * count,
    )
    return replace(plain, **changes)


def shape(units: int = 3, micro_batches: int = 1, chunks: int = 1, size: int = 10) -> StepShape:
    chunk = ChunkShape(weight_bytes=2 * size, state_bytes=10 * size, gradient_bytes=4 * size)
    return StepShape(
        units=(UnitShape(chunks=(chunk,) * chunks),) * units, micro_batches=micro_batches, boundary_bytes=8
    )


def schedule(*operations: tuple[Kind, Resource, int, tuple[int, ...]]) -> Schedule:
    """Operations (kind, resource, bytes, after) of unit 0 in one pool that nobody looks at."""
    return Schedule(
        name="by hand",
        operations=tuple(
            Operation(index=i, kind=kind, resource=resource, unit=0, bytes=size, after=after)
            for i, (kind, resource, size, after) in enumerate(operations)
        ),
        pools={},
        live_in=frozenset(),
        live_out=frozenset(),
    )


READ = (Kind.LOAD_WEIGHTS, Resource.SSD_READ)
WRITE = (Kind.STORE_STATE, Resource.SSD_WRITE)
FORWARD = (Kind.FORWARD, Resource.COMPUTE)
COPY = (Kind.HOLD_GRADIENT, Resource.CPU)


def test_operations_wait_for_what_they_must_and_for_their_queue():
    run = simulate(
        schedule((*READ, 200, ()), (*FORWARD, 0, (0,)), (*READ, 100, ()), (*FORWARD, 0, (2,))), shape(), costs()
    )
    assert run.starts == (0.0, 2.0, 2.0, 3.0)
    assert run.ends == (2.0, 3.0, 3.0, 4.0)
    assert run.seconds == 4.0
    assert run.busy[Resource.SSD_READ] == 3.0
    assert run.busy[Resource.COMPUTE] == 2.0


def test_reads_and_writes_share_the_disk_while_both_are_there():
    # Together 60 and 25 bytes a second: the read of 120 ends at 2 s, when 50 of the 100 bytes are written.
    run = simulate(schedule((*READ, 120, ()), (*WRITE, 100, ())), shape(), costs())
    assert run.ends == pytest.approx((2.0, 3.0))
    assert run.disk_busy == pytest.approx(3.0)
    assert (run.ssd_read_bytes, run.ssd_written_bytes) == (120, 100)


def test_a_transfer_under_way_slows_down_when_the_other_direction_begins():
    # 100 bytes read alone in the first second, 60 a second after the write has begun.
    run = simulate(schedule((*FORWARD, 0, ()), (*READ, 160, ()), (*WRITE, 25, (0,))), shape(), costs())
    assert run.ends == pytest.approx((1.0, 2.0, 2.0))


def test_computation_and_the_host_share_cores():
    slow = costs(contention=Contention(compute=0.5, cpu=0.25))
    run = simulate(schedule((*FORWARD, 0, ()), (*COPY, 400, ())), shape(), slow)
    # the forward takes 2 s at half speed; the copy has done half a second's work by then
    assert run.ends == pytest.approx((2.0, 2.5))


def test_computation_loses_time_for_every_byte_that_is_moved():
    # 200 bytes cost 2 s, shared out as 1 and 3 s of computation are
    slow = costs(contention=Contention(transfer=0.01))
    backward = (Kind.BACKWARD, Resource.COMPUTE)
    run = simulate(schedule((*FORWARD, 0, ()), (*backward, 0, ()), (*READ, 150, ()), (*WRITE, 50, ())), shape(), slow)
    assert run.ends[:2] == pytest.approx((1.5, 6.0))
    assert run.busy[Resource.COMPUTE] == pytest.approx(4.0 + 2.0)
    assert run.seconds == pytest.approx(least_seconds(run.schedule, shape(), slow))
    with pytest.raises(ValueError, match="not below 0"):
        Contention(transfer=-1.0)


@pytest.mark.parametrize(
    ("measured", "forward", "backward"),
    [({}, 1.0, 2.0), ({"kept_forward": 1.25}, 1.25, 2.0), ({"kept_backward": 2.5}, 1.0, 2.5)],
)
def test_kept_activations_take_the_time_that_was_measured_or_no_recompute(measured, forward, backward):
    own = costs(units=(UnitSeconds(forward=1.0, backward=3.0, **measured),))
    operations = [
        Operation(index=i, kind=kind, resource=Resource.COMPUTE, unit=0, reads=reads)
        for i, (kind, reads) in enumerate(product((Kind.FORWARD, Kind.BACKWARD), ((), (Buffer("kept_activation", 0),))))
    ]
    found = [own.work(operation, shape()) for operation in operations]
    assert found == [1.0, forward, 3.0, backward]


def test_latency_and_what_lies_outside_operations_count():
    slow = costs(overhead={Resource.SSD_READ: 0.5}, step_overhead=7.0)
    run = simulate(schedule((*READ, 100, ()), (*READ, 100, ())), shape(), slow)
    assert run.ends == (1.5, 3.0)
    assert run.seconds == 10.0


def test_a_schedule_that_cannot_end_is_an_error():
    with pytest.raises(ValueError, match="cannot end"):
        simulate(schedule((*READ, 1, (1,)), (*READ, 1, ())), shape(), costs())


def test_live_bytes_are_counted_from_start_to_end():
    pool = {"weights": Pool(tier=Tier.HOST, slot_bytes=(5, 7))}
    made = Buffer("weights", 0), Buffer("weights", 1)
    operations = (
        Operation(index=0, kind=READ[0], resource=READ[1], unit=0, bytes=100, writes=(made[0],)),
        Operation(
            index=1, kind=FORWARD[0], resource=FORWARD[1], unit=0, after=(0,), reads=(made[0],), releases=(made[0],)
        ),
        Operation(index=2, kind=READ[0], resource=READ[1], unit=0, bytes=100, writes=(made[1],), releases=(made[1],)),
    )
    run = simulate(
        Schedule(name="", operations=operations, pools=pool, live_in=frozenset(), live_out=frozenset()),
        shape(),
        costs(),
    )
    assert run.peak_bytes[Tier.HOST] == 12  # the second read runs behind the forward


CHUNKS = st.lists(
    st.integers(1, 40).map(lambda n: ChunkShape(weight_bytes=2 * n, state_bytes=10 * n, gradient_bytes=4 * n)),
    min_size=1,
    max_size=4,
)
SHAPES = st.builds(
    lambda units, micro_batches, boundary, tied: StepShape(
        units=tuple(UnitShape(chunks=tuple(chunks)) for chunks in units),
        micro_batches=micro_batches,
        boundary_bytes=boundary,
        kept_bytes=3 * boundary,
        tied=tied,
    ),
    st.lists(CHUNKS, min_size=3, max_size=6),
    st.integers(1, 4),
    st.integers(1, 100),
    st.booleans(),
)
CHOICES = st.builds(
    lambda place, **settings: Choices(
        separate_device=place[0], boundaries_on_device=place[1], boundaries_on_ssd=place[2], **settings
    ),
    st.sampled_from([(False, 0, 0), (False, 0, 0.5), (True, 1, 0), (True, 0, 0), (True, 0, 1), (True, 0.3, 0.4)]),
    kept_activations=st.sampled_from([0.0, 0.6, 1.0]),
    delayed_share=st.sampled_from([0.0, 0.3, 1.0]),
    wait_for_norm=st.booleans(),
    resident_weights=st.sampled_from([0.0, 0.4]),
    resident_state=st.sampled_from([0.0, 0.5]),
    gradients=st.sampled_from([Tier.HOST, Tier.SSD]),
    weight_slots=st.integers(1, 3),
    gradient_slots=st.integers(1, 2),
    state_slots=st.integers(1, 3),
)
NAMES = st.sampled_from(sorted(BUILDERS))
EIGHTHS = st.sampled_from([0.25, 0.5, 0.75, 1.0])


@settings(max_examples=150, deadline=None)
@given(SHAPES, CHOICES, NAMES, EIGHTHS, EIGHTHS)
def test_any_schedule_runs_by_the_rules(step, choices, name, compute_share, cpu_share):
    built = BUILDERS[name](step, choices, pending=True)
    some = costs(len(step.units), contention=Contention(compute=compute_share, cpu=cpu_share, transfer=0.01))
    run = simulate(built, step, some)
    queue_ends = dict.fromkeys(Resource, 0.0)
    for operation, start, end in zip(built.operations, run.starts, run.ends, strict=True):
        assert start >= queue_ends[operation.resource]
        assert all(start >= run.ends[earlier] for earlier in operation.after)
        queue_ends[operation.resource] = end
    assert run.seconds == max(run.ends)
    # no resource does more than it can, and every transfer moves its bytes at the rates of its time
    for operation, start, end in zip(built.operations, run.starts, run.ends, strict=True):
        for one, other, alone, mixed in (
            (Resource.SSD_READ, Resource.SSD_WRITE, DISK.read, DISK.mixed_read),
            (Resource.SSD_WRITE, Resource.SSD_READ, DISK.write, DISK.mixed_write),
        ):
            if operation.resource == one:
                both = sum(
                    max(0.0, min(end, run.ends[o.index]) - max(start, run.starts[o.index]))
                    for o in built.operations
                    if o.resource == other
                )
                assert both * mixed + (end - start - both) * alone == pytest.approx(operation.bytes, abs=1e-6)
    # live memory stays within what is reserved
    assert run.peak_bytes[Tier.HOST] <= built.reserved_bytes(Tier.HOST)
    assert run.peak_bytes[Tier.DEVICE] <= built.reserved_bytes(Tier.DEVICE)
    assert run.peak_bytes[Tier.SSD] <= built.reserved_bytes(Tier.SSD)
    assert run.events()[-1].end_s == run.ends[-1]


@settings(max_examples=100, deadline=None)
@given(SHAPES, CHOICES, NAMES, st.sampled_from(["h2d", "d2h", "copy", "optimizer", "read", "write", "units"]))
def test_a_faster_resource_never_makes_a_schedule_slower(step, choices, name, faster):
    """Holds for any schedule where resources share nothing: queues have a fixed order."""
    apart = DiskRates(read=100.0, write=50.0, mixed_read=100.0, mixed_write=50.0)
    before = costs(len(step.units), disk=apart)
    if faster in ("read", "write"):
        after = replace(before, disk=replace(apart, **{faster: 2 * getattr(apart, faster)}))
        after = replace(after, disk=replace(after.disk, mixed_read=after.disk.read, mixed_write=after.disk.write))
    elif faster == "units":
        after = replace(before, units=(UnitSeconds(forward=0.5, backward=1.5),) * len(step.units))
    else:
        after = replace(before, **{faster: 2 * getattr(before, faster)})
    built = BUILDERS[name](step, choices, pending=True)
    assert simulate(built, step, after).seconds <= simulate(built, step, before).seconds * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(SHAPES, CHOICES, NAMES)
def test_one_by_one_the_peak_is_the_checkers(step, choices, name):
    """Each operation made to wait for the one before it, live bytes are those that the checker counts."""
    built = BUILDERS[name](step, choices, pending=True)
    chained = one_by_one(built)
    peaks = check_schedule(built)
    assert check_schedule(chained) == peaks
    assert [o.resource for o in chained.operations] == [o.resource for o in built.operations]
    run = simulate(chained, step, costs(len(step.units)))
    assert run.peak_bytes == {Tier.DEVICE: peaks.device, Tier.HOST: peaks.host, Tier.SSD: peaks.ssd}
    busy = sum(run.busy.values())
    assert run.seconds == pytest.approx(busy)
