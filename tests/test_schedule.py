"""Schedules are safe for any shape and choice, and the checker sees what is not."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.schedule import (
    BUILDERS,
    Choices,
    ChunkShape,
    Kind,
    Schedule,
    ScheduleError,
    StepShape,
    Tier,
    UnitShape,
    build_evaluation,
    build_flush,
    check_schedule,
    step_pools,
)

CHUNK = st.integers(1, 64).map(
    lambda n: ChunkShape(weight_bytes=2 * n, state_bytes=10 * n, gradient_bytes=4 * n),
)


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    def unit(needs_weights: bool) -> UnitShape:
        all_frozen = draw(st.integers(0, 3)) == 0
        return UnitShape(
            chunks=tuple(draw(st.lists(CHUNK, min_size=0 if all_frozen else 1, max_size=0 if all_frozen else 5))),
            frozen_weight_bytes=draw(st.sampled_from([0, 8])),
            backward_needs_weights=needs_weights,
        )

    layers = draw(st.integers(1, 6))
    return StepShape(
        units=(unit(draw(st.booleans())), *(unit(True) for _ in range(layers)), unit(True)),
        micro_batches=draw(st.integers(1, 5)),
        boundary_bytes=draw(st.integers(1, 1000)),
        kept_bytes=draw(st.integers(1, 5000)),
        tied=draw(st.booleans()),
    )


SHARE = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
CHOICES = st.builds(
    lambda separate, on_ssd, on_device, **settings: Choices(
        separate_device=separate,
        boundaries_on_ssd=on_ssd,
        boundaries_on_device=on_device * (1 - on_ssd) if separate else 0.0,
        **settings,
    ),
    st.booleans(),
    SHARE,
    SHARE,
    kept_activations=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
    delayed_share=st.floats(0, 1),
    wait_for_norm=st.booleans(),
    resident_weights=st.sampled_from([0.0, 0.3, 1.0]),
    resident_state=st.sampled_from([0.0, 0.5, 1.0]),
    gradients=st.sampled_from([Tier.HOST, Tier.SSD]),
    group_size=st.one_of(st.none(), st.integers(1, 6)),
    snake=st.booleans(),
    weight_slots=st.integers(1, 4),
    gradient_slots=st.integers(1, 3),
    state_slots=st.integers(1, 3),
)
KINDS = st.sampled_from(sorted(BUILDERS))


@settings(max_examples=300, deadline=None)
@given(shapes(), CHOICES, KINDS, st.booleans(), st.booleans())
def test_every_schedule_is_safe_and_fits_what_it_reserves(shape, choices, name, pending, snapshot):
    schedule = BUILDERS[name](shape, choices, pending=pending, snapshot=snapshot)
    assert schedule.pools == step_pools(name, shape, choices)
    peaks = check_schedule(schedule)
    assert peaks.host <= schedule.reserved_bytes(Tier.HOST)
    assert peaks.device <= schedule.reserved_bytes(Tier.DEVICE)
    assert bool(peaks.device) == choices.separate_device
    assert peaks.ssd <= schedule.reserved_bytes(Tier.SSD)
    # what one step leaves behind is what the next one expects
    steady = BUILDERS[name](shape, choices, pending=True)
    assert check_schedule(steady)
    assert steady.live_out == schedule.live_out == steady.live_in


@settings(max_examples=150, deadline=None)
@given(shapes(), CHOICES, KINDS)
def test_a_step_does_everything_once(shape, choices, name):
    schedule = BUILDERS[name](shape, choices, pending=True)
    did = lambda kind: [(o.unit, o.micro_batch) for o in schedule.operations if o.kind == kind]  # noqa: E731
    head, micro_batches = len(shape.units) - 1, range(shape.micro_batches)
    assert sorted(did(Kind.FORWARD)) == [(u, m) for u in range(head) for m in micro_batches]
    trained = [u for u, unit in enumerate(shape.units) if unit.chunks]
    passed = range(min(trained, default=head), head)  # nothing before the first trained unit needs a gradient
    assert sorted(did(Kind.BACKWARD)) == [(u, m) for u in passed for m in micro_batches]
    assert sorted(did(Kind.HEAD)) == [(head, m) for m in micro_batches]
    updates = sorted((o.unit, o.chunk) for o in schedule.operations if o.kind == Kind.UPDATE)
    assert updates == [(u, c) for u, unit in enumerate(shape.units) for c in range(len(unit.chunks))]
    assert sorted(did(Kind.GRADIENT_NORM)) == [(u, None) for u in trained]
    assert len(did(Kind.TOTAL_NORM)) == 1


@settings(max_examples=100, deadline=None)
@given(shapes(), CHOICES)
def test_vertical_moves_each_byte_of_weights_at_most_twice_a_group_plus_ties_and_late_updates(shape, choices):
    schedule = BUILDERS["vertical"](shape, choices, pending=True)
    loads = [o.unit for o in schedule.operations if o.kind == Kind.LOAD_WEIGHTS]
    for unit in range(len(shape.units)):
        ties = shape.tied and unit == 0
        assert loads.count(unit) <= (2 + ties) * len(choices.groups(shape)) + choices.wait_for_norm
    head = len(shape.units) - 1
    order = schedule.backward_order(head)
    groups = [list(group) for group in choices.groups(shape)]
    assert order == [m for group in groups for m in (reversed(group) if choices.snake and head % 2 else group)]


@settings(max_examples=100, deadline=None)
@given(shapes(), CHOICES)
def test_flush_updates_the_delayed_share_and_leaves_nothing(shape, choices):
    schedule = build_flush(shape, choices)
    check_schedule(schedule)
    assert not [buffer for buffer in schedule.live_out if buffer.pool == "held"]
    delayed = sum(len(choices.delayed_chunks(unit)) for unit in shape.units)
    assert sum(o.kind == Kind.UPDATE for o in schedule.operations) == delayed


@settings(max_examples=100, deadline=None)
@given(shapes(), CHOICES)
def test_evaluation_gives_one_loss_a_micro_batch_and_changes_nothing(shape, choices):
    schedule = build_evaluation(shape, choices)
    check_schedule(schedule)
    assert sorted(o.micro_batch for o in schedule.operations if o.kind == Kind.LOSS) == list(range(shape.micro_batches))
    assert not [o for o in schedule.operations if o.kind in (Kind.UPDATE, Kind.STORE_STATE, Kind.STORE_BOUNDARY)]


@settings(max_examples=100, deadline=None)
@given(shapes(), CHOICES, KINDS)
def test_only_boundaries_that_a_backward_needs_are_kept(shape, choices, name):
    schedule = BUILDERS[name](shape, choices, pending=True)
    head = len(shape.units) - 1
    first = min((u for u, unit in enumerate(shape.units) if unit.chunks), default=head)
    kept = {o.unit for o in schedule.operations if o.kind == Kind.COPY_BOUNDARY_OUT}
    assert kept == {u for u in range(max(0, first - 1), head) if choices.boundary_leaves(u, head + 1)}
    assert {o.unit for o in schedule.operations if o.kind == Kind.COPY_BOUNDARY_IN} == kept


def _small(**choices) -> Schedule:
    chunk = ChunkShape(weight_bytes=2, state_bytes=10, gradient_bytes=4)
    shape = StepShape(units=(UnitShape(chunks=(chunk,) * 5),) * 4, micro_batches=2, boundary_bytes=16)
    return BUILDERS["vertical"](shape, Choices(**choices), pending=True)


@pytest.mark.parametrize(
    "choices",
    [{}, {"delayed_share": 0.5}, {"boundaries_on_ssd": 1.0}, {"boundaries_on_ssd": 0.5}, {"wait_for_norm": True}],
)
def test_every_dependency_between_resources_is_needed(choices):
    """Dropping any edge that no other path implies must be seen: the checker cannot be lenient."""
    schedule = _small(**choices)
    check_schedule(schedule)
    seen = 0
    for operation in schedule.operations:
        if not operation.after:
            continue
        bare = replace(operation, after=())
        operations = (
            *schedule.operations[: operation.index],
            bare,
            *schedule.operations[operation.index + 1 :],
        )
        try:
            check_schedule(replace(schedule, operations=operations))
        except ScheduleError:
            seen += 1
    assert seen > len(schedule.operations) // 2


def test_the_checker_names_each_broken_rule():
    schedule = _small(delayed_share=0.5)

    def broken(index: int, **changes) -> str:
        changed = replace(schedule.operations[index], **changes)
        operations = (*schedule.operations[:index], changed, *schedule.operations[index + 1 :])
        with pytest.raises(ScheduleError) as caught:
            check_schedule(replace(schedule, operations=operations))
        return str(caught.value)

    first = {
        kind: next(o for o in schedule.operations if o.kind == kind)
        for kind in Kind
        if kind in {o.kind for o in schedule.operations}
    }
    load, forward = first[Kind.LOAD_WEIGHTS], first[Kind.FORWARD]
    assert "holds nothing" in broken(load.index, writes=())
    assert "without waiting for" in broken(forward.index, after=())
    assert "is not before it" in broken(load.index, after=(forward.index,))
    releasing = next(o for o in schedule.operations if any(b.pool == "weights" for b in o.releases))
    assert "was never released" in broken(releasing.index, releases=())
    last = next(o for o in reversed(schedule.operations) if o.releases)
    assert "is never released" in broken(last.index, releases=())
    # two state slots serve more than two chunks: some load must wait for the store that empties its slot
    messages = []
    for load in (o for o in schedule.operations if o.kind == Kind.LOAD_STATE and o.after):
        try:
            messages.append(broken(load.index, after=()))
        except pytest.fail.Exception:  # implied by another edge
            continue
    assert any("reuses" in message for message in messages)


def test_impossible_shapes_and_choices_are_refused():
    chunk = ChunkShape(weight_bytes=2, state_bytes=10, gradient_bytes=4)
    with pytest.raises(ValueError, match="at least one decoder unit"):
        StepShape(units=(UnitShape(chunks=(chunk,)),), micro_batches=1, boundary_bytes=1)
    with pytest.raises(ValueError, match="delayed_share"):
        Choices(delayed_share=1.5)
    with pytest.raises(ValueError, match="gradient_slots"):
        Choices(gradient_slots=0)
