"""The loss scale of float16 against torch's own GradScaler."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.optim import LossScaling, first_scale

LARGEST = torch.finfo(torch.float32).max


@settings(max_examples=60, deadline=None)
@given(
    finite=st.lists(st.booleans(), max_size=20),
    initial=st.sampled_from([2.0**30, 2.0**126]),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 4),
)
def test_the_scale_is_that_of_grad_scaler(finite, initial, growth, backoff, interval):
    scale = first_scale(
        "float16",
        LossScaling(initial=initial, growth=growth, backoff=backoff, growth_interval=interval, smallest=2.0**-60),
    )
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=initial, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(parameter * 0)
    for good in finite:
        parameter.grad = torch.tensor(1.0 if good else math.inf)
        scaler.step(optimizer)
        scaler.update()
        scale = scale.after_step(finite=good)
        assert scale.scale == scaler.get_scale() <= LARGEST
        assert scale.good_steps == scaler.state_dict()["_growth_tracker"]


def test_the_usual_settings_are_those_of_grad_scaler():
    scaler, scaling = torch.amp.GradScaler("cpu"), LossScaling()
    assert scaling.initial == scaler.get_scale()
    assert scaling.growth == scaler.get_growth_factor()
    assert scaling.backoff == scaler.get_backoff_factor()
    assert scaling.growth_interval == scaler.get_growth_interval()


def test_the_scale_does_not_fall_below_the_smallest():
    scale = first_scale("float16", LossScaling(initial=4.0, smallest=2.0))
    counted = []
    for _ in range(3):
        counted.append(scale.counts_as_skipped(loss_finite=True))
        scale = scale.after_step(finite=False)
    assert scale.scale == 2.0
    assert counted == [False, True, True]  # only where it could not fall any more
    assert scale.after_step(finite=True).counts_as_skipped(loss_finite=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_types_are_not_scaled(dtype):
    scale = first_scale(dtype, LossScaling(initial=8.0))
    for finite in (True, False, *[True] * 3000):
        assert (scale.scale, scale.reported, scale.explain("x")) == (1.0, None, "x")
        assert scale.counts_as_skipped(loss_finite=True)
        scale = scale.after_step(finite=finite)


def test_all_problems_of_settings_come_in_one_error():
    with pytest.raises(ValueError) as caught:
        LossScaling(initial=3.0, growth=0.5, backoff=1.0, growth_interval=0, smallest=16.0)
    assert str(caught.value).split("; ") == [
        "initial must be a power of two, got 3.0",
        "growth must be at least 1, got 0.5",
        "backoff must lie between 0 and 1, got 1.0",
        "growth_interval must be at least 1, got 0",
        "initial must be at least smallest, 16.0, got 3.0",
    ]
    for value in (0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="growth must be a power of two"):
            LossScaling(growth=value)
