"""Gradients of 16-bit parameters in float32 sums: bit for bit what autograd adds, without its float32 copies."""

import pytest
import torch
from architectures import random_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_masters import MasterTrainer
from small_types import small_config_of
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer
from greedysnake.models.gradient_sums import GradientSums
from greedysnake.models.skeleton import build_skeleton
from greedysnake.optim import LossScaling
from greedysnake.plan.model_sizes import activation_sizes

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


class Scaled(torch.autograd.Function):
    """A function that gives a gradient in float32 for a parameter of any dtype."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.shape = parameter.shape
        return parameter.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.linspace(0, 1, ctx.shape.numel()).reshape(ctx.shape) / 3 * gradient


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
            total = total + linear(x, parameter.flatten(0, -2)).pow(2).sum()
        elif kind == "transposed":  # its gradient comes with the strides of another matrix
            x = torch.randn(3, parameter.shape[-2], generator=generator).to(parameter.dtype)
            total = total + (x @ parameter).pow(2).sum()
        elif kind == "promoted":  # its gradient comes in float32, not rounded to the parameter's dtype
            x = torch.randn(parameter.shape, generator=generator)
            total = total + (x * parameter).pow(2).sum().to(parameter.dtype)
        elif kind == "function":
            total = total + Scaled.apply(parameter)
        elif kind == "lookup":
            rows = torch.randint(0, parameter.shape[-2], (5,), generator=generator)
            total = total + embedding(rows, parameter.flatten(0, -2)).pow(2).sum()
        else:
            total = total + (parameter * float(torch.randn((), generator=generator))).sum()
    return total


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["product", "transposed", "lookup", "elements", "promoted", "function"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    shape=st.sampled_from([(LARGE, LARGE), (5, 7), (1, 300_000), (300_000, 1), (2, 400, 400)]),
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_whose_norms_give_float32_gradients_trains_as_plain_pytorch(dtype, tmp_path):
    """Its norms scale float32 numbers with 16-bit weights."""
    config = small_config_of("olmo2")
    config.tie_word_embeddings = False
    with Trainer(config, tmp_path / "first", dtype=dtype) as trainer:
        trainer.save_pretrained(tmp_path / "before")
    optimizer, scaling = AdamW(lr=2e-3, max_grad_norm=0.5), LossScaling(initial=256)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "before", dtype=getattr(torch, dtype))
    plain = MasterTrainer(before, optimizer, scaling)
    settings = {"dtype": dtype, "optimizer": optimizer, "snake": False}
    with Trainer(tmp_path / "before", tmp_path / "store", loss_scaling=scaling, **settings) as trainer:
        for batch in random_batches(3):
            assert trainer.step(batch).loss == pytest.approx(plain.step(batch), rel=1e-6)
        trainer.save_pretrained(tmp_path / "after")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=getattr(torch, dtype)).state_dict()
    assert [name for name, value in plain.model.state_dict().items() if not torch.equal(after[name], value)] == []


@pytest.mark.parametrize(("model_type", "each"), [("llama", 2), ("qwen2_moe", 6), ("dbrx", 6)])
def test_experts_in_one_tensor_are_counted_with_what_autograd_casts(model_type, each):
    skeleton = build_skeleton(small_config_of(model_type), dtype=torch.bfloat16)
    expected = [
        slot.elements * (each if "experts." in slot.name and "shared" not in slot.name else 2)
        for slot in skeleton.layouts[1].parameters
    ]
    assert activation_sizes(skeleton).units[0].gradient_bytes == max(expected)
    assert (each == 6) == (max(expected) > 2 * max(slot.elements for slot in skeleton.layouts[1].parameters))
