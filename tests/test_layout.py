"""Flat buffers: where parameters lie, and how chunks cut them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.models.layout import CHUNK_ALIGNMENT, PARAMETER_ALIGNMENT, Chunk, ParameterInfo, lay_out
from greedysnake.storage import BLOCK_BYTES

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 20_000)),
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.tuples(st.integers(1, 8), st.integers(1, 40), st.integers(1, 40)),
)
infos = st.builds(
    ParameterInfo,
    shape=shapes,
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    decay=st.booleans(),
)
mixed = st.lists(st.tuples(infos, st.booleans()), max_size=8).map(
    lambda found: {f"layer.{i}": replace(info, trainable=trainable) for i, (info, trainable) in enumerate(found)}
)
parameters = st.lists(infos, max_size=8).map(lambda found: {f"layer.{i}": info for i, info in enumerate(found)})
chunk_sizes = st.integers(1, 6).map(lambda blocks: blocks * CHUNK_ALIGNMENT)


@settings(max_examples=150, deadline=None)
@given(parameters=parameters, chunk_elements=chunk_sizes)
def test_parameters_keep_apart_and_aligned(parameters, chunk_elements):
    layout = lay_out(parameters, chunk_elements)
    assert sorted(slot.name for slot in layout.parameters) == sorted(parameters)
    owner = torch.full((layout.gradient_elements,), -1)
    bytes_owner = torch.full((layout.weight_bytes,), -1)
    for number, slot in enumerate(layout.parameters):
        info = parameters[slot.name]
        assert (slot.shape, slot.dtype, slot.decay) == (info.shape, info.dtype, info.decay)
        assert slot.elements == math.prod(info.shape)
        assert slot.gradient_offset % PARAMETER_ALIGNMENT == 0
        assert slot.weight_offset % (PARAMETER_ALIGNMENT * slot.dtype.itemsize) == 0
        for taken, start, count in [
            (owner, slot.gradient_offset, slot.elements),
            (bytes_owner, slot.weight_offset, slot.elements * slot.dtype.itemsize),
        ]:
            assert start + count <= taken.numel()
            assert (taken[start : start + count] == -1).all()
            taken[start : start + count] = number


@settings(max_examples=150, deadline=None)
@given(parameters=parameters, chunk_elements=chunk_sizes)
def test_chunks_cover_the_buffers_end_to_end(parameters, chunk_elements):
    layout = lay_out(parameters, chunk_elements)
    weight_end = gradient_end = 0
    for chunk in layout.chunks:
        assert (chunk.weight_offset, chunk.gradient_offset) == (weight_end, gradient_end)
        assert 0 < chunk.elements <= chunk_elements
        assert chunk.elements % CHUNK_ALIGNMENT == 0
        assert chunk.weight_bytes == chunk.elements * chunk.dtype.itemsize
        masters = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}
        assert chunk.state_bytes == chunk.elements * (masters[chunk.dtype] + 4 + 4)
        for count in (chunk.weight_bytes, chunk.state_bytes, chunk.weight_offset, 4 * chunk.gradient_offset):
            assert count % BLOCK_BYTES == 0
        weight_end += chunk.weight_bytes
        gradient_end += chunk.elements
    assert (layout.weight_bytes, layout.gradient_elements) == (weight_end, gradient_end)
    dtypes = [chunk.dtype for chunk in layout.chunks]
    assert dtypes == sorted(dtypes, key=dtypes.index), "chunks of one dtype lie together"
    # Only the last chunk of a dtype may be smaller, and padding is less than its alignment asks for.
    full = [chunk.elements == chunk_elements for chunk in layout.chunks]
    lasts = [i for i, dtype in enumerate(dtypes) if dtype not in dtypes[i + 1 :]]
    assert all(whole or i in lasts for i, whole in enumerate(full))
    used = sum(math.prod(info.shape) for info in parameters.values())
    assert gradient_end - used < PARAMETER_ALIGNMENT * len(parameters) + CHUNK_ALIGNMENT * len(lasts) + 1


@settings(max_examples=150, deadline=None)
@given(parameters=parameters, chunk_elements=chunk_sizes)
def test_every_element_lies_in_exactly_one_piece(parameters, chunk_elements):
    layout = lay_out(parameters, chunk_elements)
    decayed = torch.zeros(layout.gradient_elements, dtype=torch.int8)  # 1 or 2 with a piece, 3 and more with several
    starts = {slot.gradient_offset: slot for slot in layout.parameters if slot.elements}
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            assert 0 <= piece.start <= piece.start + piece.elements <= chunk.elements
            decayed[chunk.gradient_offset + piece.start :][: piece.elements] += 2 if piece.decay else 1
            if piece.elements:  # it starts at a multiple of 8 elements of its one parameter
                first = chunk.gradient_offset + piece.start
                slot = starts[max(start for start in starts if start <= first)]
                assert first + piece.elements <= slot.gradient_offset + slot.elements
                assert (first - slot.gradient_offset) % PARAMETER_ALIGNMENT == 0
    expected = torch.zeros_like(decayed)
    for slot in layout.parameters:
        expected[slot.gradient_offset :][: slot.elements] = 2 if slot.decay else 1
    assert torch.equal(decayed, expected)


@settings(max_examples=150, deadline=None)
@given(parameters=mixed, chunk_elements=chunk_sizes)
def test_frozen_parameters_lie_behind_the_others_and_have_weights_alone(parameters, chunk_elements):
    layout = lay_out(parameters, chunk_elements)
    trained = {name: info for name, info in parameters.items() if info.trainable}
    alone = lay_out(trained, chunk_elements)
    assert layout.chunks == alone.chunks, "as if the frozen ones were not there"
    assert layout.gradient_elements == alone.gradient_elements
    assert [slot for slot in layout.parameters if slot.trainable] == list(alone.parameters)
    weight_end, end = alone.weight_bytes, alone.gradient_elements
    for chunk in layout.frozen:
        assert (chunk.weight_offset, chunk.gradient_offset, chunk.pieces) == (weight_end, end, ())
        weight_end, end = weight_end + chunk.weight_bytes, end + chunk.elements
    assert (layout.weight_bytes, layout.elements) == (weight_end, end)
    shape = layout.shape()
    assert shape.weight_bytes == layout.weight_bytes
    assert shape.frozen_weight_bytes == weight_end - alone.weight_bytes
    weights, everything = torch.zeros(layout.weight_bytes, dtype=torch.uint8), torch.zeros(layout.elements)
    for number, slot in enumerate(layout.parameters, start=1):
        slot.weight(weights).fill_(number)
        slot.gradient(everything).fill_(number)
    flat = [chunk.weights(weights).view(chunk.dtype).float() for chunk in (*layout.chunks, *layout.frozen)]
    assert torch.equal(torch.cat([*flat, torch.empty(0)]), everything)


@settings(max_examples=50, deadline=None)
@given(parameters=parameters, chunk_elements=chunk_sizes)
def test_views_are_of_the_buffers(parameters, chunk_elements):
    layout = lay_out(parameters, chunk_elements)
    weights, gradients = torch.zeros(layout.weight_bytes, dtype=torch.uint8), torch.zeros(layout.gradient_elements)
    for number, slot in enumerate(layout.parameters, start=1):
        assert slot.weight(weights).shape == slot.gradient(gradients).shape == slot.shape
        assert slot.weight(weights).dtype == slot.dtype
        slot.weight(weights).fill_(number)
        slot.gradient(gradients).fill_(number)
    flat = [chunk.weights(weights).view(chunk.dtype).float() for chunk in layout.chunks]
    assert torch.equal(torch.cat([*flat, torch.empty(0)]), gradients)
    assert torch.equal(torch.cat([*(c.gradient(gradients) for c in layout.chunks), torch.empty(0)]), gradients)


def test_the_sizes_that_a_schedule_is_built_from():
    infos = {
        "a": ParameterInfo(shape=(3 * CHUNK_ALIGNMENT,), dtype=torch.bfloat16, decay=True),
        "b": ParameterInfo(shape=(5,), dtype=torch.float32, decay=False),
    }
    layout = lay_out(infos, 2 * CHUNK_ALIGNMENT)
    shape = layout.shape(backward_needs_weights=False)
    assert not shape.backward_needs_weights
    assert layout.shape().backward_needs_weights
    assert [(c.weight_bytes, c.state_bytes, c.gradient_bytes) for c in shape.chunks] == [
        (2 * 8192, 10 * 8192, 4 * 8192),
        (2 * 4096, 10 * 4096, 4 * 4096),
        (4 * 4096, 8 * 4096, 4 * 4096),
    ]


def test_dtypes_lie_in_the_order_of_their_first_parameters():
    infos = {
        name: ParameterInfo(shape=(100,), dtype=dtype, decay=True)
        for name, dtype in [("a", torch.float32), ("b", torch.bfloat16), ("c", torch.float32)]
    }
    layout = lay_out(infos, CHUNK_ALIGNMENT)
    assert [(s.name, s.weight_offset, s.gradient_offset) for s in layout.parameters] == [
        ("a", 0, 0),
        ("c", 512, 128),
        ("b", 4 * 4096, 4096),
    ]
    assert [(c.dtype, len(c.pieces)) for c in layout.chunks] == [(torch.float32, 2), (torch.bfloat16, 1)]


def test_a_unit_without_parameters():
    layout = lay_out({})
    assert (layout.parameters, layout.chunks, layout.weight_bytes, layout.gradient_elements) == ((), (), 0, 0)


@pytest.mark.parametrize("count", [0, -4096, 1, 4095, 6000])
def test_chunk_sizes_that_are_not_whole_blocks(count):
    with pytest.raises(ValueError, match=f"chunk_elements must be a positive multiple of 4096, got {count}"):
        lay_out({}, count)


def test_a_chunk_knows_its_bytes():
    chunk = Chunk(dtype=torch.bfloat16, elements=4096, weight_offset=8192, gradient_offset=4096, pieces=())
    assert (chunk.weight_bytes, chunk.state_bytes) == (8192, 40960)
    assert replace(chunk, split_master=False).state_bytes == 40960 + 2 * 4096
    wide = replace(chunk, dtype=torch.float32, split_master=False)  # a float32 weight is its own master
    assert wide.state_bytes == replace(wide, split_master=True).state_bytes == 8 * 4096
