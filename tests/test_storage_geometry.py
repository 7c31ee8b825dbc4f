"""Which byte of a striped file lies where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedysnake.storage import BLOCK_BYTES
from greedysnake.storage.geometry import MAX_FOLDERS, MAX_WEIGHT, Geometry, arranged, place, weighted, weights_for

WEIGHTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)
STRIPES = st.integers(1, 3).map(lambda blocks: blocks * BLOCK_BYTES)


@st.composite
def geometries(draw) -> Geometry:
    if draw(st.booleans()):
        return weighted(draw(WEIGHTS), draw(STRIPES))
    folders = draw(st.integers(1, 4))
    pattern = [*range(folders), *draw(st.lists(st.integers(0, folders - 1), max_size=6))]
    return Geometry(pattern=tuple(draw(st.permutations(pattern))), stripe_bytes=draw(STRIPES))


@given(geometry=geometries(), blocks=st.integers(0, 80))
def test_every_byte_has_one_place_of_its_own_and_sizes_add_up(geometry, blocks):
    total = blocks * BLOCK_BYTES
    sizes = geometry.folder_bytes(total)
    assert sum(sizes) == total
    free = [list(range(0, size, BLOCK_BYTES)) for size in sizes]
    end = 0
    for piece in geometry.pieces(0, total):
        assert piece.start == end
        assert 0 < piece.length <= geometry.stripe_bytes
        for offset in range(piece.offset, piece.offset + piece.length, BLOCK_BYTES):
            free[piece.folder].remove(offset)  # raises where two bytes share a place, or one lies outside its file
        end += piece.length
    assert end == total
    assert not any(free)


@given(geometry=geometries(), blocks=st.integers(1, 60), data=st.data())
def test_a_range_lies_where_the_whole_file_has_it(geometry, blocks, data):
    def places(start: int, count: int) -> dict[int, tuple[int, int]]:
        return {
            piece.start + at: (piece.folder, piece.offset + at)
            for piece in geometry.pieces(start, count)
            for at in range(0, piece.length, BLOCK_BYTES)
        }

    low = data.draw(st.integers(0, blocks))
    high = data.draw(st.integers(low, blocks))
    whole = places(0, blocks * BLOCK_BYTES)
    found = places(low * BLOCK_BYTES, (high - low) * BLOCK_BYTES)
    assert found == {at: whole[at] for at in range(low * BLOCK_BYTES, high * BLOCK_BYTES, BLOCK_BYTES)}
    cuts = [piece.start for piece in geometry.pieces(low * BLOCK_BYTES, (high - low) * BLOCK_BYTES)][1:]
    assert all(cut % geometry.stripe_bytes == 0 for cut in cuts)


@given(weights=WEIGHTS)
def test_a_pattern_gives_each_folder_its_weight_at_any_time(weights):
    geometry = weighted(weights)
    assert geometry.weights == tuple(weights)
    for count in range(1, len(geometry.pattern) + 1):
        for folder, weight in enumerate(weights):
            fair = count * weight / sum(weights)
            assert abs(geometry.pattern[:count].count(folder) - fair) < len(weights)


@given(rates=st.lists(st.floats(1e6, 1e10), min_size=1, max_size=6))
def test_weights_follow_rates(rates):
    def together(weights) -> float:
        return sum(weights) / max(weight / rate for weight, rate in zip(weights, rates, strict=True))

    weights = weights_for(rates)
    assert all(1 <= weight <= 8 for weight in weights)
    assert together(weights) >= together([1] * len(rates)) * 0.999
    if max(rates) < 8 * min(rates):  # so that small integers can come near
        assert together(weights) >= 0.7 * sum(rates)


def test_weights_of_a_few_machines():
    assert weights_for([2.0e9]) == (1,)
    assert weights_for([2.0e9, 2.1e9, 1.9e9]) == (1, 1, 1)
    assert weights_for([3.0e9, 1.0e9]) == (3, 1)
    assert weights_for([7.0e9, 3.4e9]) == (2, 1)
    assert weights_for([100.0, 1.0]) == (8, 1)


@given(sizes=st.lists(st.integers(0, 12).map(lambda blocks: blocks * BLOCK_BYTES), max_size=8), stripe=STRIPES)
def test_extents_of_whole_stripes_are_not_cut_more_than_they_must(sizes, stripe):
    extents = {f"e{i}": size for i, size in enumerate(sizes)}
    ordered = arranged(extents, stripe)
    assert ordered == extents
    geometry, end = weighted([1], stripe), 0
    for key, start in place(ordered).items():
        assert start == end
        end += ordered[key]
        if ordered[key] % stripe == 0:
            assert len(list(geometry.pieces(start, ordered[key]))) == ordered[key] // stripe
    assert end == sum(sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Geometry(pattern=()), "names 1 to 256 folders"),
        (lambda: Geometry(pattern=(1, 2)), "from 0 on"),
        (lambda: Geometry(pattern=(0, 2)), "from 0 on"),
        (lambda: Geometry(pattern=(0, -1)), "from 0 on"),
        (lambda: Geometry(pattern=tuple(range(MAX_FOLDERS + 1))), "names 1 to 256 folders"),
        (lambda: Geometry(pattern=(0,) * (MAX_WEIGHT + 1)), "at most 64 times"),
        (lambda: Geometry(pattern=(0,), stripe_bytes=0), "whole blocks"),
        (lambda: Geometry(pattern=(0,), stripe_bytes=-4096), "whole blocks"),
        (lambda: Geometry(pattern=(0,), stripe_bytes=1000), "whole blocks"),
        (lambda: Geometry(pattern=(0,), stripe_bytes=2**31), "at most 1 GiB"),
        (lambda: weighted([]), "integers from 1 to 64"),
        (lambda: weighted([1, 0]), "integers from 1 to 64"),
        (lambda: weighted([65]), "integers from 1 to 64"),
    ],
)
def test_geometries_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()
