"""Slots are as large as what schedules bring into them, and no larger."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import CHOICES, KINDS, shapes

from greedysnake.schedule import (
    BUILDERS,
    Buffer,
    Choices,
    ChunkShape,
    Kind,
    StepShape,
    UnitShape,
    build_evaluation,
    build_flush,
    fit_pools,
    slot_extents,
    step_pools,
)

FILLING = {Kind.LOAD_WEIGHTS, Kind.COPY_WEIGHTS, Kind.COPY_GRADIENT_IN, Kind.COPY_GRADIENT_OUT, Kind.LOAD_STATE}


@settings(max_examples=100, deadline=None)
@given(shapes(), CHOICES, KINDS, st.lists(st.booleans(), min_size=1, max_size=2))
def test_everything_fits_where_it_comes_and_nothing_is_spare(shape, choices, name, pendings):
    schedules = [BUILDERS[name](shape, choices, pending=pending) for pending in pendings]
    schedules += [build_flush(shape, choices), build_evaluation(shape, choices)]
    pools = step_pools(name, shape, choices)
    extents = slot_extents(schedules, shape)
    fitted = fit_pools(pools, extents)
    assert fitted.keys() == pools.keys()
    moved: dict[Buffer, int] = {}
    used = set()
    for operation in (operation for schedule in schedules for operation in schedule.operations):
        used |= {buffer.whole for buffer in (*operation.reads, *operation.writes)}
        if operation.kind in FILLING:
            target = operation.writes[0]
            moved[target] = max(moved.get(target, 0), operation.bytes)
    for buffer, size in moved.items():
        assert fitted[buffer.pool].slot_bytes[buffer.slot] >= size
    for pool in ("weights", "device_weights", "state"):  # what moves into these says its size
        for slot, size in enumerate(fitted[pool].slot_bytes):
            assert size == (max(1, moved[Buffer(pool, slot)]) if Buffer(pool, slot) in used else 0)
    for pool in pools:
        sizes = zip(fitted[pool].slot_bytes, pools[pool].slot_bytes, strict=True)
        assert all(0 <= size <= max(1, most) for size, most in sizes)


def test_a_slot_that_only_decoder_units_use_has_their_size():
    def unit(size: int) -> UnitShape:
        return UnitShape(chunks=(ChunkShape(weight_bytes=2 * size, state_bytes=10 * size, gradient_bytes=4 * size),))

    shape = StepShape(units=(unit(100), unit(7), unit(7), unit(7), unit(100)), micro_batches=2, boundary_bytes=1)
    choices = Choices(weight_slots=3, gradient_slots=2, state_slots=4)
    schedule = BUILDERS["vertical"](shape, choices, pending=False)
    fitted = fit_pools(schedule.pools, slot_extents([schedule], shape))
    assert schedule.pools["gradient"].slot_bytes == (400, 400)
    # gradients of head, three decoder units, embedding take turns
    assert fitted["gradient"].slot_bytes == (400, 28)
    assert fitted["state"].slot_bytes == (1000, 70, 70, 70)
    assert fitted["held"] == schedule.pools["held"]
