"""Gradients of 16-bit parameters in float32 sums: bit for bit what autograd adds, without its float32 copies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from greedysnake.models.gradient_sums import GradientSums

LARGE = 700  # rows and columns: more than are cast at once


class Large(TorchDispatchMode):
    """Counts float32 tensors as large as a parameter that operators give."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "detach" not in str(func) and "as_strided" not in str(func):
            for value in tree_leaves(result):
                if isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() == self.elements:
                    self.found.append(str(func))
        return result


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[nn.Parameter, Tensor]:
    """A parameter, and a first sum of its gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    parameter.grad_dtype = torch.float32
    return parameter, torch.randn(shape, generator=generator)


def loss_of(kind: str, parameter: nn.Parameter, times: int, seed: int) -> Tensor:
    """A scalar that the parameter is used for, ``times`` times."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=parameter.dtype)
    for _ in range(times):
        if kind == "product":
            x = torch.randn(3, parameter.shape[-1], generator=generator).to(parameter.dtype)
            total = total + linear(x, parameter).pow(2).sum()
        elif kind == "transposed":  # its gradient comes with the strides of another matrix
            x = torch.randn(3, parameter.shape[0], generator=generator).to(parameter.dtype)
            total = total + (x @ parameter).pow(2).sum()
        elif kind == "lookup":
            rows = torch.randint(0, parameter.shape[0], (5,), generator=generator)
            total = total + embedding(rows, parameter).pow(2).sum()
        else:
            total = total + (parameter * float(torch.randn((), generator=generator))).sum()
    return total


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["product", "transposed", "lookup", "elements"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    shape=st.sampled_from([(LARGE, LARGE), (5, 7), (1, 300_000), (300_000, 1)]),
    times=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_the_sums_are_those_of_autograd_bit_for_bit(kind, dtype, shape, times, seed):
    sums = []
    for ours in (True, False):
        parameter, start = made(shape, dtype, seed)
        parameter.grad = start
        backward = GradientSums([parameter]).backward if ours else torch.autograd.backward
        for micro_batch in range(2):
            backward([loss_of(kind, parameter, times, seed + micro_batch)])
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.data_ptr() == start.data_ptr()  # in place: it is a view of the unit's buffer
        sums.append(parameter.grad)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))


@pytest.mark.parametrize("kind", ["product", "transposed", "lookup"])
def test_no_float32_copy_of_a_gradient_is_made(kind):
    found = []
    for ours in (True, False):
        parameter, parameter.grad = made((LARGE, LARGE), torch.bfloat16, 0)
        backward = GradientSums([parameter]).backward if ours else torch.autograd.backward
        root = loss_of(kind, parameter, 1, 1)
        with Large(LARGE * LARGE) as large:
            backward([root])
        found.append([name for name in large.found if "to_copy" in name])
    assert found[0] == []
    assert found[1] != []  # autograd does, so the test sees it


def test_vectors_scalars_and_parameters_beside_each_other():
    shapes = [(), (300_001,), (2, 3), (3, 400, 400)]
    sums = []
    for ours in (True, False):
        parameters = []
        for seed, shape in enumerate(shapes):
            parameter, parameter.grad = made(shape, torch.bfloat16, seed)
            parameters.append(parameter)
        without = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))  # not asked for: no sum to add to
        frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        backward = GradientSums([*parameters, without, frozen]).backward if ours else torch.autograd.backward
        backward([sum((p * 3).sum() for p in [*parameters, *parameters[:2]]) + (without * frozen).sum()])
        sums.append([parameter.grad for parameter in (*parameters, without)])
        assert frozen.grad is None
    for one, other in zip(*sums, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_backward_that_fails_leaves_the_sums_in_place_and_closing_removes_the_hooks():
    parameter, start = made((4, 4), torch.bfloat16, 0)
    parameter.grad = start
    sums = GradientSums([parameter])
    root = loss_of("product", parameter, 1, 0)
    root.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sums.backward([root])
    assert parameter.grad is start or parameter.grad.data_ptr() == start.data_ptr()
    assert parameter.grad_dtype == torch.float32
    sums.close()
    before = start.clone()
    loss_of("product", parameter, 1, 0).backward()
    assert not torch.equal(parameter.grad, before)
