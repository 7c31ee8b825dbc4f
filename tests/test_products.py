"""Products of 16-bit matrices by way of float32: rounded once, of any size, in little memory, and a whole model so."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from architectures import random_batches
from plain_masters import MasterTrainer
from rich.console import Console
from small_run import write_config
from small_types import small_config_of
from torch import Tensor, nn
from torch.nn.functional import conv1d, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer
from greedysnake.bench.check import family
from greedysnake.bench.systems import find_systems
from greedysnake.cli.training import run_training
from greedysnake.config import load_config
from greedysnake.engine.products import CHOICES, Float32Products, computing_products, float32_types
from greedysnake.errors import ConfigError

TYPES = [torch.bfloat16, torch.float16]
BOTH = frozenset(TYPES)


class Wide(TorchDispatchMode):
    """Notes the largest float32 tensor that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                self.largest = max(self.largest, value.numel())
        return result


class Made(TorchDispatchMode):
    """Notes the bytes of each tensor that operators make anew."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            value.untyped_storage().data_ptr() for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)
        }
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given:
                self.sizes.append(value.nbytes)
        return result


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_rounded_once(found: Tensor, operation: Callable[..., Tensor], *inputs: Tensor, magnitude: float = 0) -> None:
    """``found`` is the operation's result in float64, rounded: off by half a unit in the last place, and float32's."""
    exact = operation(*(tensor.double() for tensor in inputs))
    assert found.shape == exact.shape
    assert found.dtype == inputs[0].dtype
    half = torch.finfo(found.dtype).eps / 2
    assert ((found.double() - exact).abs() <= exact.abs() * half * 1.001 + 1e-5 * (magnitude or 1)).all()


SHAPES = [(5, 7, 3), (1, 2100, 2), (1030, 3, 1030), (3, 1030, 2050), (1024, 1024, 1), (0, 4, 4), (4, 0, 4), (4, 4, 0)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_of_any_size_is_rounded_once(shape, turned, dtype):
    rows, terms, columns = shape
    left = drawn(terms, rows, dtype=dtype).t() if turned else drawn(rows, terms, dtype=dtype)
    right = drawn(columns, terms, dtype=dtype, seed=1).t() if turned else drawn(terms, columns, dtype=dtype, seed=1)
    with Float32Products(BOTH):
        found = left @ right
    assert_rounded_once(found, torch.mm, left, right, magnitude=max(1, terms) ** 0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, -2), (0, 3)])
@pytest.mark.parametrize("shape", [(5, 7, 3), (1030, 1030, 2)])
def test_what_is_added_is_added_before_rounding(shape, beta, alpha, dtype):
    rows, terms, columns = shape
    inputs = drawn(columns, dtype=dtype, seed=2), drawn(rows, terms, dtype=dtype), drawn(terms, columns, dtype=dtype)
    batch = inputs[0], *(tensor[None].repeat(3, 1, 1) for tensor in inputs[1:])
    for operation, given in ((torch.addmm, inputs), (torch.baddbmm, batch)):
        with Float32Products(BOTH):
            found = operation(*given, beta=beta, alpha=alpha)
        exact = lambda *wide, operation=operation: operation(*wide, beta=beta, alpha=alpha)  # noqa: E731
        assert_rounded_once(found, exact, *given, magnitude=3 * terms**0.5)


@pytest.mark.parametrize("dtype", TYPES)
def test_batches_vectors_and_convolutions(dtype):
    many = drawn(70, 150, 160, dtype=dtype), drawn(70, 160, 170, dtype=dtype)  # more than are computed at once
    large = drawn(2, 1030, 4, dtype=dtype), drawn(2, 4, 1030, dtype=dtype)
    shared = drawn(1, 9, 6, dtype=dtype).expand(8, 9, 6), drawn(8, 6, 5, dtype=dtype)
    signal, kernel = drawn(2, 6, 30, dtype=dtype), drawn(6, 1, 4, dtype=dtype)
    matrix, vector = drawn(1030, 20, dtype=dtype), drawn(20, dtype=dtype)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        *((torch.bmm, pair) for pair in (many, large, shared)),
        (torch.mv, (matrix, vector)),
        (torch.dot, (vector, vector.flip(0))),
        (torch.addmv, (drawn(1030, dtype=dtype), matrix, vector)),
        (lambda a, b: conv1d(a, b, padding=3, groups=6), (signal, kernel)),
        (
            lambda a, b: torch.einsum("bhij,bhjk->bhik", a, b),
            (many[0].view(7, 10, 150, 160), many[1].view(7, 10, 160, 170)),
        ),
    ]
    for operation, inputs in cases:
        with Float32Products(BOTH):
            found = operation(*inputs)
        assert_rounded_once(found, operation, *inputs, magnitude=15)


def gradients(operation: Callable[..., Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """The result, and the gradient of each input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = operation(*leaves)
    result.backward(drawn(*result.shape, seed=9).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_like_float32(operation: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Result and gradients are those of float32, but for rounding: backward begins from a result of 16 bits."""
    with Float32Products(BOTH):
        found = gradients(operation, inputs)
    wanted = gradients(operation, [tensor.float() for tensor in inputs])
    assert len(found) == 1 + len(inputs)
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.dtype == inputs[0].dtype
        assert (ours.float() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 6), (4, 2)])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "mask a head", "truth"])
def test_attention_forward_and_back(kind, heads, key_heads, dtype):
    inputs = [drawn(2, count, 9, 16, dtype=dtype, seed=count) for count in (heads, key_heads, key_heads)]
    options: dict = {"enable_gqa": heads != key_heads, "is_causal": kind == "causal", "scale": 0.3}
    seen = torch.ones(9, 9).tril().bool().expand(2, heads if kind == "mask a head" else 1, 9, 9)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if kind.startswith("mask"):
            options["attn_mask"] = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -1e4)
        elif kind == "truth":
            options["attn_mask"] = seen
        return scaled_dot_product_attention(query, key, value, **options)

    assert_like_float32(attend, *inputs)


@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "tokens"), [(1, 12, 12, 1500), (3, 8, 2, 1000), (40, 4, 4, 250)]
)
def test_large_attention_is_computed_some_rows_and_heads_after_others(rows, heads, key_heads, tokens):
    inputs = [drawn(rows, count, tokens, 64, seed=count) for count in (heads, key_heads, key_heads)]
    mask = torch.zeros(rows, 1, tokens, tokens, dtype=torch.bfloat16)
    mask[-1, :, :, 3] = -1e4

    def attend(*them: Tensor) -> Tensor:
        own = mask.to(them[0].dtype)
        return scaled_dot_product_attention(*them, attn_mask=own, enable_gqa=heads != key_heads)

    query = inputs[0].clone().requires_grad_()
    with Wide() as wide, Float32Products(BOTH):
        attend(query, *inputs[1:]).backward(inputs[0])
    assert 0 < wide.largest <= max(2**20, tokens**2)  # a row's mask is converted whole
    assert_like_float32(attend, *inputs)


def test_strides_are_those_of_attention_without():
    for turned in (False, True):
        inputs = [drawn(2, 7, 4, 16, seed=1).transpose(1, 2) if turned else drawn(2, 4, 7, 16) for _ in range(3)]
        with Float32Products(BOTH):
            ours = gradients(scaled_dot_product_attention, inputs)
        theirs = gradients(scaled_dot_product_attention, inputs)
        assert [tensor.stride() for tensor in ours] == [tensor.stride() for tensor in theirs]


def test_products_of_experts_forward_and_back():
    ends = torch.tensor([3, 3, 20], dtype=torch.int32)  # the second expert gets nothing

    def by_expert(tokens: Tensor, experts: Tensor) -> Tensor:
        if tokens.dtype != torch.float32:
            return torch._grouped_mm(tokens, experts, offs=ends)
        return torch.cat(
            [tokens[start:end] @ matrix for start, end, matrix in zip([0, 3, 3], ends, experts, strict=True)]
        )

    assert_like_float32(by_expert, drawn(20, 32), drawn(3, 32, 24))
    for left, right, slices in (
        (drawn(3, 8, 16), drawn(16, 24), lambda start, end, index, a, b: a[index] @ b[:, start:end]),
        (drawn(3, 8, 16), drawn(3, 16, 24), None),
    ):
        with Float32Products(BOTH):
            found = torch._grouped_mm(left, right, offs=None if slices is None else ends)
        if slices is None:
            assert torch.allclose(found.float(), left.float() @ right.float(), rtol=0.01, atol=0.01)
            continue
        for index, (start, end) in enumerate(zip([0, 3, 3], ends, strict=True)):
            exact = slices(start, end, index, left.float(), right.float())
            assert torch.allclose(found[:, start:end].float(), exact, rtol=0.01, atol=0.01)


def test_gradients_of_experts_are_there_once():
    tokens, errors, ends = drawn(20, 600), drawn(20, 500), torch.tensor([3, 3, 20], dtype=torch.int32)
    with Made() as made, Float32Products(BOTH):
        found = torch._grouped_mm(tokens.t(), errors, offs=ends)
    assert found.shape == (3, 600, 500)
    assert sum(size == found.nbytes for size in made.sizes) == 1


WRONG = [
    (torch.mm, (drawn(9, 1024), drawn(2048, 3))),
    (torch.mv, (drawn(9, 1024), drawn(2048))),
    (torch.bmm, (drawn(2, 9, 2000), drawn(5, 2000, 900))),
    (torch.mm, (drawn(9, 8), drawn(8, 3, dtype=torch.float32))),
    (torch.mm, (drawn(9, 8), drawn(8, 3, dtype=torch.float16))),
    (torch.addmm, (drawn(3), drawn(9, 8, dtype=torch.float32), drawn(8, 3, dtype=torch.float32))),
    (torch.addmm, (drawn(3, dtype=torch.float32), drawn(9, 8), drawn(8, 3))),
]


@pytest.mark.parametrize(("operation", "inputs"), WRONG)
def test_what_torch_refuses_is_refused(operation, inputs):
    for products in ("native", "float32"):
        with computing_products(products), pytest.raises(RuntimeError):
            operation(*inputs)


def test_few_rows_are_left_to_torch():
    weights = drawn(300, 200)
    for rows, own in ((1, 0), (7, 0), (8, 1)):
        entry = drawn(rows, 200)
        with Wide() as wide, Float32Products(BOTH):
            found = nn.functional.linear(entry, weights)
        assert (wide.largest > 0) == bool(own)
        assert_rounded_once(found, nn.functional.linear, entry, weights, magnitude=200**0.5)


def test_a_layer_keeps_what_it_keeps_without_and_makes_no_large_float32():
    layer, entry = nn.Linear(1500, 2100, dtype=torch.bfloat16), drawn(3000, 1500).requires_grad_()
    kept: dict[bool, list] = {}
    for ours in (True, False):
        kept[ours] = []
        pack = lambda tensor, kept=kept[ours]: kept.append((tensor.shape, tensor.dtype)) or tensor  # noqa: E731
        with (
            Wide() as wide,
            computing_products("float32" if ours else "native"),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            result = layer(entry)
            if ours:
                result.sum().backward()
                assert 0 < wide.largest <= 2**20
    assert kept[True] == kept[False] != []
    assert layer.weight.grad.dtype == entry.grad.dtype == torch.bfloat16


def test_other_types_are_left_alone():
    left, right = drawn(30, 40, dtype=torch.float32), drawn(40, 50, dtype=torch.float32)
    with Float32Products(BOTH):
        assert torch.equal(left @ right, torch.mm(left, right))
        assert (left.double() @ right.double()).dtype == torch.float64
    half = drawn(30, 40, dtype=torch.float16)
    with Wide() as wide, Float32Products(frozenset([torch.bfloat16])):
        half @ half.t()
    assert wide.largest == 0


def test_which_types():
    assert float32_types("float32") == BOTH
    assert float32_types("native") == frozenset()
    assert (torch.bfloat16 not in float32_types("auto")) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (torch.float16 not in float32_types("auto")) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


@pytest.mark.parametrize("products", ["native", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "mamba2"])
def test_a_model_learns_the_same_bits_as_in_plain_pytorch(model_type, dtype, products, tmp_path):
    optimizer = AdamW(lr=2e-3, max_grad_norm=0.5)
    batches = random_batches(3, padding=model_type != "mamba2")
    config = small_config_of(model_type)
    with Trainer(config, tmp_path / "first", dtype=dtype) as trainer:
        trainer.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    plain = MasterTrainer(model, optimizer, products=products)
    with Trainer(
        tmp_path / "model",
        tmp_path / "store",
        dtype=dtype,
        optimizer=optimizer,
        matrix_products=products,
        snake=False,
        delayed_share=0.5,
    ) as trainer:
        for batch in batches[:2]:
            assert trainer.step(batch).loss == pytest.approx(plain.step(batch), rel=1e-6)
    with Trainer.resume(tmp_path / "store") as trainer:
        assert trainer.settings.matrix_products == products
        assert trainer.step(batches[2]).loss == pytest.approx(plain.step(batches[2]), rel=1e-6)
        trainer.save_pretrained(tmp_path / "after")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=dtype).state_dict()
    theirs = plain.model.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_run_says_so(dtype, tmp_path, capsys):
    settings = {"training.steps": 1, "model.dtype": dtype, "engine.matrix_products": "float32", "run": tmp_path / "run"}
    run_training(
        load_config(write_config(tmp_path), [f"{name}={value}" for name, value in settings.items()]), Console()
    )
    said = f"Products of {dtype} matrices by way of float32, as engine.matrix_products says" in capsys.readouterr().out
    assert said == (dtype != "float32")


@pytest.mark.parametrize("name", ["torch-activations-in-memory", "zero-infinity-in-memory"])
def test_the_benchmark_lends_them_to_others(name):
    own, lent = find_systems([name, f"{name}-float32-products"])
    assert lent == replace(own, name=lent.name, settings={**own.settings, "products": "float32"})
    assert family(lent.name) == family(own.name)
    with pytest.raises(ConfigError, match="found greedysnake-float32-products; known are greedysnake, "):
        find_systems(["greedysnake-float32-products"])


def test_what_makes_no_sense_is_refused(tmp_path):
    overrides = ["engine.matrix_products=float32", "engine.device=cuda"]
    with pytest.raises(ConfigError, match=r"engine.matrix_products: found float32, .* needs auto or native"):
        load_config(write_config(tmp_path), overrides)
    with pytest.raises(ConfigError, match=f"matrix_products: 'fast' is not one of {', '.join(CHOICES)}"):
        Trainer(small_config_of("llama"), tmp_path / "store", matrix_products="fast")
    with pytest.raises(ConfigError, match="matrix_products: must be 'auto' or 'native' where the device is 'cuda:1'"):
        Trainer(small_config_of("llama"), tmp_path / "store", device="cuda:1", matrix_products="float32")
    assert not (tmp_path / "store").exists()
