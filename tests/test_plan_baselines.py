"""Other systems' orders: safe schedules that move what those systems are known to move."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.plan.baselines import build_baseline, untied
from greedysnake.schedule import ChunkShape, Kind, Resource, StepShape, UnitShape, check_schedule


def _shape(layers: int, micro_batches: int, chunks: int = 3, size: int = 100, tied: bool = False) -> StepShape:
    chunk = ChunkShape(weight_bytes=2 * size, state_bytes=12 * size, gradient_bytes=4 * size)
    return StepShape(
        units=(UnitShape(chunks=(chunk,) * chunks),) * (layers + 2),
        micro_batches=micro_batches,
        boundary_bytes=8,
        tied=tied,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_baselines_are_safe_schedules(layers, micro_batches, chunks, on_ssd, resident):
    shape = untied(_shape(layers, micro_batches, chunks, tied=True))
    check_schedule(build_baseline(shape, resident_weights=resident, on_ssd=on_ssd))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_zero_infinity_moves_what_deepspeed_moves(micro_batches):
    """18 B a parameter written; 16 read, and weights twice for each micro-batch."""
    shape = _shape(6, micro_batches)
    parameters = sum(unit.gradient_bytes for unit in shape.units) // 4
    schedule = build_baseline(shape)
    moved = dict.fromkeys(Resource, 0)
    for operation in schedule.operations:
        moved[operation.resource] += operation.bytes
    assert moved[Resource.SSD_WRITE] == 18 * parameters
    head = shape.units[-1].weight_bytes  # loaded once for forward and backward
    assert moved[Resource.SSD_READ] == 16 * parameters + micro_batches * (4 * parameters - head)


def test_zero_offload_touches_no_ssd_and_updates_everything_at_the_end():
    schedule = build_baseline(_shape(4, 2), on_ssd=False)
    assert not [o for o in schedule.operations if o.resource in (Resource.SSD_READ, Resource.SSD_WRITE)]
    kinds = [o.kind for o in schedule.operations]
    assert kinds.index(Kind.UPDATE) > max(i for i, kind in enumerate(kinds) if kind == Kind.BACKWARD)
