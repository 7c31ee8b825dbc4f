"""Streamed AdamW against torch's own, lossless master weights, clipping and learning rates."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.models.layout import CHUNK_ALIGNMENT, ParameterInfo, UnitLayout, lay_out
from greedysnake.optim import (
    AdamW,
    ChunkUpdater,
    LearningRate,
    UpdateScalars,
    join_master,
    parameter_norms,
    read_master,
    split_master,
    total_norm,
    write_master,
)

# Master weights


def round_trip(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int16 pattern of the weights, and the bits that come back."""
    weights = torch.empty(bits.numel(), dtype=torch.bfloat16)
    remainders = torch.empty(bits.numel(), dtype=torch.int16)
    split_master(bits.clone().view(torch.float32), weights, remainders)
    joined = join_master(weights, remainders, torch.full(bits.shape, math.nan))
    return weights.view(torch.int16), joined.view(torch.int32)


def assert_lossless(bits: torch.Tensor) -> None:
    weights, joined = round_trip(bits)
    assert torch.equal(joined, bits)
    documented = (((bits.long() & 0xFFFFFFFF) + 2**15) >> 16).to(torch.int16)
    assert torch.equal(weights, documented)


@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
@settings(deadline=None)
def test_a_split_master_comes_back_bit_for_bit(bits):
    assert_lossless(torch.tensor(bits, dtype=torch.int32))


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=50))
@settings(deadline=None)
def test_a_split_master_comes_back_for_any_number(values):
    assert_lossless(torch.tensor(values, dtype=torch.float32).view(torch.int32))


def test_a_split_master_comes_back_for_every_half_with_many_others():
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    chosen = torch.randint(-(2**15), 2**15, (120,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    edges = torch.tensor([0, 1, -1, 2**15 - 1, -(2**15), 0x7F80 - 2**16, 0x7F80, 0x7F7F, 0x0080], dtype=torch.int32)
    for other in torch.cat([chosen[:20], edges]):
        low = other & 0xFFFF
        assert_lossless((halves << 16) | low)  # every upper half: signs, exponents, infinities, NaN
        assert_lossless((other << 16) | (halves & 0xFFFF))  # every lower half: ties among them


def test_weights_are_the_nearest_bfloat16_and_ties_go_away_from_zero():
    generator = torch.Generator().manual_seed(2)
    scales = torch.tensor([1e-42, 1e-39, 1e-20, 1e-3, 1.0, 1e10, 3e38])  # denormals first
    values = (torch.randn(200_000, generator=generator)[:, None] * scales).flatten()
    values = values[values.isfinite()]
    weights = round_trip(values.view(torch.int32))[0].view(torch.bfloat16)
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weights[~ties], values.bfloat16()[~ties])
    upper = torch.arange(0, 0x7F7F, dtype=torch.int32)
    at_ties = ((upper << 16) | 0x8000).view(torch.float32)
    for sign in (1, -1):
        weights = round_trip((sign * at_ties).view(torch.int32))[0].view(torch.bfloat16).float()
        assert (weights.abs() > at_ties).all()
        assert (weights.sign() == sign).all()


# Updates


@st.composite
def units(draw):
    """Parameters of a unit, mostly of sizes that leave a remainder for the kernel's scalar code."""
    shape = st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 9000)),
        st.tuples(st.integers(1, 90), st.integers(1, 90)),
    )
    dtype = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
    infos = st.builds(ParameterInfo, shape=shape, dtype=dtype, decay=st.booleans())
    return {f"p{i}": info for i, info in enumerate(draw(st.lists(infos, min_size=1, max_size=5)))}


settings_of_adamw = st.builds(
    AdamW,
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)]),
    eps=st.sampled_from([1e-8, 1e-6]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    decay_norms_and_biases=st.booleans(),
)


class Unit:
    """A unit's buffers, updated by chunks."""

    def __init__(self, layout: UnitLayout, masters: dict[str, torch.Tensor], optimizer: AdamW) -> None:
        self.layout = layout
        self.weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
        self.states = [torch.zeros(chunk.state_bytes, dtype=torch.uint8) for chunk in layout.chunks]
        self.updater = ChunkUpdater(optimizer, max(chunk.elements for chunk in layout.chunks))
        flat = torch.zeros(layout.gradient_elements)
        for slot in layout.parameters:
            slot.gradient(flat).copy_(masters[slot.name])
        for chunk, state in zip(layout.chunks, self.states, strict=True):
            typed = chunk.weights(self.weights).view(chunk.dtype)
            write_master(chunk.gradient(flat), typed, state[: -8 * chunk.elements])

    def update(self, gradients: dict[str, torch.Tensor], scalars: UpdateScalars) -> None:
        flat = torch.zeros(self.layout.gradient_elements)
        for slot in self.layout.parameters:
            slot.gradient(flat).copy_(gradients[slot.name])
        for chunk, state in zip(self.layout.chunks, self.states, strict=True):
            self.updater.update(chunk, chunk.weights(self.weights), state, chunk.gradient(flat), scalars)

    def parts(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Master weight and both moments of each parameter."""
        flat = [torch.empty(self.layout.gradient_elements) for _ in range(3)]
        for chunk, state in zip(self.layout.chunks, self.states, strict=True):
            typed, low = chunk.weights(self.weights).view(chunk.dtype), state[: -8 * chunk.elements]
            master, first, second = (chunk.gradient(buffer) for buffer in flat)
            master.copy_(read_master(typed, low, torch.empty(chunk.elements)))
            moments = state[-8 * chunk.elements :].view(torch.float32)
            first.copy_(moments[: chunk.elements])
            second.copy_(moments[chunk.elements :])
        return {slot.name: tuple(slot.gradient(buffer) for buffer in flat) for slot in self.layout.parameters}


@settings(max_examples=40, deadline=None)
@given(
    parameters=units(),
    cut=st.tuples(st.integers(1, 3), st.booleans()),
    optimizer=settings_of_adamw,
    steps=st.lists(
        st.tuples(st.sampled_from([1e-3, 0.02, 0.0]), st.booleans(), st.sampled_from([1.0, 2.0**16, 2.0**-3])),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
def test_chunk_updates_equal_torch_bit_for_bit(parameters, cut, optimizer, steps, seed):
    blocks, split = cut
    generator = torch.Generator().manual_seed(seed)
    plain = {name: torch.randn(info.shape, generator=generator) for name, info in parameters.items()}
    unit = Unit(lay_out(parameters, blocks * CHUNK_ALIGNMENT, split_master=split), plain, optimizer)
    groups = [
        {
            "params": [plain[name] for name, info in parameters.items() if info.decay == decay],
            "weight_decay": optimizer.weight_decay if decay or optimizer.decay_norms_and_biases else 0.0,
        }
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=optimizer.betas, eps=optimizer.eps, fused=True)
    for number, (lr, large, scale) in enumerate(steps, start=1):
        for tensor in plain.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator) * (3.0 if large else 1e-5)
        gradients = {name: tensor.grad * scale for name, tensor in plain.items()}
        norm = total_norm(parameter_norms(gradients.values()), optimizer.max_grad_norm, scale)
        expected = torch.nn.utils.clip_grad_norm_(plain.values(), optimizer.max_grad_norm)
        assert norm.norm == expected.item()
        assert norm.finite
        unit.update(gradients, UpdateScalars(lr=lr, number=number, clip=norm.clip, loss_scale=scale))
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        for name, parts in unit.parts().items():
            state = reference.state[plain[name]]
            for part, wanted in zip(parts, (plain[name], state["exp_avg"], state["exp_avg_sq"]), strict=True):
                assert torch.equal(part.view(torch.int32), wanted.view(torch.int32)), name
    for slot in unit.layout.parameters:
        weight = slot.weight(unit.weights)
        if slot.dtype == torch.float32:
            assert torch.equal(weight, plain[slot.name])
        elif slot.dtype == torch.float16:
            assert torch.equal(weight, plain[slot.name].half())
        else:
            bits = (plain[slot.name].view(torch.int32).long() + 2**15) >> 16
            assert torch.equal(weight.view(torch.int16), bits.to(torch.int16))


def test_padding_stays_zero():
    layout = lay_out({"p": ParameterInfo(shape=(70,), dtype=torch.bfloat16, decay=True)}, CHUNK_ALIGNMENT)
    unit = Unit(layout, {"p": torch.ones(70)}, AdamW())
    unit.update({"p": torch.ones(70)}, UpdateScalars(lr=0.1, number=1, clip=0.5))
    weights = unit.weights.view(torch.bfloat16)
    assert weights[:70].all()
    assert not weights[70:].any()


# Norms


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e10]),
    largest=st.sampled_from([1e-3, 1.0, 50.0, math.inf]),
    seed=st.integers(0, 2**32),
)
def test_the_norm_and_the_clipping_equal_torch_bit_for_bit(sizes, scale, largest, seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.zeros(size) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    gradients = [parameter.grad.clone() for parameter in parameters]
    mine = total_norm(parameter_norms(gradients), largest)
    theirs = torch.nn.utils.clip_grad_norm_(parameters, largest)
    assert mine.norm == theirs.item()
    assert mine.clip <= 1
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(gradient.mul_(mine.clip), parameter.grad)
    assert total_norm(parameter_norms(gradients), None).clip == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])  # the last one's square overflows
def test_a_norm_that_is_not_finite_is_told(value):
    gradients = [torch.ones(10), torch.tensor([1.0, value])]
    for largest in (1.0, None):
        assert not total_norm(parameter_norms(gradients), largest).finite
    assert total_norm(parameter_norms(gradients[:1]), None).finite


# Learning rates


def rates(**options) -> list[float]:
    schedule = LearningRate(**options)
    return [schedule.at(step) for step in range(schedule.steps)]


def test_learning_rates_written_out():
    assert rates(peak=1.0, steps=3) == [1.0, 1.0, 1.0]
    assert rates(peak=8.0, steps=6, warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(peak=1.0, steps=5, shape="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(peak=1.0, steps=7, shape="linear", warmup_steps=2, min_ratio=0.5) == [
        0.5,
        1.0,
        1.0,
        0.875,
        0.75,
        0.625,
        0.5,
    ]
    cosine = rates(peak=2.0, steps=5, shape="cosine", min_ratio=0.5)
    assert cosine == pytest.approx([2.0, 1 + (2 + math.sqrt(2)) / 4, 1.5, 1 + (2 - math.sqrt(2)) / 4, 1.0])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_learning_rates_of_short_runs(shape):
    assert rates(peak=1.0, steps=1, shape=shape, min_ratio=0.1) == [1.0]
    assert rates(peak=1.0, steps=2, shape=shape, min_ratio=0.25) == [1.0, 0.25]
    assert rates(peak=1.0, steps=2, shape=shape, warmup_steps=1, min_ratio=0.25) == [1.0, 0.25]
    assert rates(peak=1.0, steps=5, shape=shape, warmup_steps=4, min_ratio=0.25) == [0.25, 0.5, 0.75, 1.0, 0.25]
    assert rates(peak=1.0, steps=2, shape=shape, warmup_steps=2) == [0.5, 1.0]


@given(
    peak=st.floats(1e-8, 10),
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    steps=st.integers(2, 60),
    warmup=st.integers(0, 59),
    min_ratio=st.floats(0, 1),
)
def test_learning_rates_rise_then_fall(peak, shape, steps, warmup, min_ratio):
    warmup = min(warmup, steps - 1)
    schedule = LearningRate(peak=peak, shape=shape, steps=steps, warmup_steps=warmup, min_ratio=min_ratio)
    values = [schedule.at(step) for step in range(steps + 3)]
    slack = 1e-12 * peak
    rising, falling = values[:warmup], values[warmup:]
    assert all(0 < before < after for before, after in pairwise(rising))
    if rising:
        assert rising[0] == peak / warmup
        assert rising[-1] == pytest.approx(peak)
    assert all(before >= after - slack for before, after in pairwise(falling))
    assert max(values) <= peak + slack
    last = peak if shape == "constant" else peak * min_ratio
    assert values[steps - 1 :] == [pytest.approx(last, abs=slack)] * 4  # and later steps stay there


# Settings


def test_settings_that_make_sense_are_taken():
    AdamW(lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, max_grad_norm=None)
    AdamW(max_grad_norm=math.inf)


def test_all_problems_come_in_one_error():
    with pytest.raises(ValueError) as caught:
        AdamW(lr=-1.0, betas=(0.9, 1.0), eps=0.0, weight_decay=-0.1, max_grad_norm=0.0)
    assert str(caught.value).split("; ") == [
        "lr must be a number from 0, got -1.0",
        "betas must be two numbers in [0, 1), got (0.9, 1.0)",
        "eps must be a positive number, got 0.0",
        "weight_decay must be a number from 0, got -0.1",
        "max_grad_norm must be positive, or None for no clipping, got 0.0",
    ]


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "max_grad_norm"])
def test_settings_that_are_not_numbers(name):
    for value in [math.nan, -math.inf, *([math.inf] if name != "max_grad_norm" else [])]:
        with pytest.raises(ValueError, match=f"{name} must be"):
            AdamW(**{name: value})


@pytest.mark.parametrize("betas", [(math.nan, 0.9), (-0.1, 0.9), (0.9,), (0.9, 0.95, 0.99)])
def test_betas_that_are_not_two_shares(betas):
    with pytest.raises(ValueError, match="betas must be two numbers"):
        AdamW(betas=betas)
