"""Products of 16-bit matrices by way of float32, for processors without instructions for them.

There torch multiplies numbers of 16 bits one by one, 10 to 500 times slower than in float32 (pytorch/pytorch#146508).
They fit in float32 exactly, so here they are converted, multiplied and added up in float32, and each result is rounded
once, as such instructions do it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CHOICES = ("auto", "native", "float32")
"""``native``: torch's own products. ``auto``: float32 for types that this processor has no instructions for."""

_BLOCK = 1024  # rows, columns and terms of a sum at once, so that float32 copies take 12 MiB whatever the matrices
_ATTENTION_ELEMENTS = 2**20  # of each tensor of the heads that are computed at once, likewise

_aten = torch.ops.aten


def computing_products(choice: str) -> AbstractContextManager[object]:
    """While it is open, what this thread computes on the CPU multiplies matrices as ``choice``, of CHOICES, says."""
    dtypes = float32_types(choice)
    return Float32Products(dtypes) if dtypes else nullcontext()


def float32_types(choice: str) -> frozenset[torch.dtype]:
    """The 16-bit types whose matrices are multiplied by way of float32."""
    if choice != "auto":
        return frozenset((torch.bfloat16, torch.float16) if choice == "float32" else ())
    # what torch's own dispatch asks
    fast = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    built = torch.backends.mkldnn.is_available()
    return frozenset(dtype for dtype, is_fast in fast.items() if not (built and is_fast()))


class Float32Products(TorchDispatchMode):
    """Carries out products of some types by way of float32, in forward and backward alike.

    What autograd keeps, and every result, has the type that it has without.

    Args:
        dtypes: of the matrices.
    """

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()
        self._dtypes = dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        work = _WORKS.get(func)
        if work is not None:
            first = next(argument for argument in args if isinstance(argument, Tensor))
            if first.dtype in self._dtypes and first.device.type == "cpu":
                return work(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _product(left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta`` added + ``alpha`` left @ right for matrices of any size, a block after another."""
    out = left.new_empty(left.shape[0], right.shape[1])
    if added is not None:
        added = added.expand_as(out)
    for rows in _blocks(left.shape[0]):
        for columns in _blocks(right.shape[1]):
            total = torch.zeros(0)
            for terms in _blocks(max(1, left.shape[1])):
                one, other = left[rows, terms].float(), right[terms, columns].float()
                total = total.addmm_(one, other) if total.numel() else one @ other
            if added is not None:
                total = total.mul_(alpha).add_(added[rows, columns], alpha=beta) if beta else total.mul_(alpha)
            out[rows, columns] = total
    return out


def _blocks(length: int, block: int = _BLOCK) -> Iterator[slice]:
    return (slice(start, start + block) for start in range(0, length, block))


def _added_product(
    added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, **_: Any
) -> Tensor:
    return _product(left, right, added, beta, alpha)


def _vector_product(left: Tensor, vector: Tensor) -> Tensor:
    return _product(left, vector[:, None])[:, 0]


def _batched_product(
    left: Tensor, right: Tensor, added: Tensor | None = None, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Likewise for each two matrices of a batch; several at once where they are small."""
    out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    added = None if added is None else added.expand_as(out)
    largest = max(1, *(tensor.shape[1] * tensor.shape[2] for tensor in (left, right, out)))
    if largest > _BLOCK**2:
        for index in range(len(left)):
            own = None if added is None else added[index]
            out[index] = _product(left[index], right[index], own, beta, alpha)
        return out
    for some in _blocks(len(left), max(1, _BLOCK**2 // largest)):
        if added is None:
            out[some] = torch.bmm(left[some].float(), right[some].float())
        else:
            own = added[some].float()
            out[some] = torch.baddbmm(own, left[some].float(), right[some].float(), beta=beta, alpha=alpha)
    return out


def _added_batched_product(
    added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, **_: Any
) -> Tensor:
    return _batched_product(left, right, added, beta, alpha)


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """Products of experts: group g is the rows, columns or terms from one entry of ``offs`` to the next."""
    if offs is None:
        return _batched_product(left, right)
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if left.dim() == 2 and right.dim() == 2:
        return torch.stack([_product(left[:, group], right[group]) for group in groups])
    if left.dim() == 2:
        out = left.new_zeros(left.shape[0], right.shape[2])
        for group, matrix in zip(groups, right, strict=True):
            out[group] = _product(left[group], matrix)
    else:
        out = left.new_zeros(left.shape[1], right.shape[1])
        for group, matrix in zip(groups, left, strict=True):
            out[:, group] = _product(matrix, right[:, group])
    return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, heads, T, d] and the logarithm of the sums [B, heads, T], float32, some heads after others."""
    out, sums = _as_computed(query, value.shape[-1]), []
    for heads in _heads(query, key, value):
        some, some_sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            *(tensor[:, heads].float() for tensor in (query, key, value)),
            dropout_p,
            is_causal,
            attn_mask=_mask_of(attn_mask, heads),
            scale=scale,
        )
        out[:, heads] = some
        sums.append(some_sums)
    return out, torch.cat(sums, dim=1)


def _attention_backward(*args: Any, attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, ...]:
    """Gradients of query, key and value from the output's, these three, the output, its sums, and options."""
    gradient, query, key, value, out, sums, *options = args
    inputs = (query, key, value)
    gradients = tuple(_as_computed(tensor, tensor.shape[-1]) for tensor in inputs)
    for heads in _heads(*inputs):
        some = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(tensor[:, heads].float() for tensor in (gradient, *inputs, out)),
            sums[:, heads],
            *options,
            attn_mask=_mask_of(attn_mask, heads),
            scale=scale,
        )
        for whole, part in zip(gradients, some, strict=True):
            whole[:, heads] = part
    return gradients


def _as_computed(like: Tensor, width: int) -> Tensor:
    """Memory for [B, heads, T, width], laid out as attention lays it out: by token."""
    rows, heads, tokens, _ = like.shape
    return like.new_empty(rows, tokens, heads, width).transpose(1, 2)


def _heads(query: Tensor, key: Tensor, value: Tensor) -> Iterator[slice]:
    """Heads to compute at once: few in memory, enough for all threads; all where heads share keys."""
    count = query.shape[1]
    if not count == key.shape[1] == value.shape[1]:
        return iter([slice(0, None)])
    each = max(1, max(tensor.numel() for tensor in (query, key, value)) // count)
    return _blocks(count, max(torch.get_num_threads(), _ATTENTION_ELEMENTS // each))


def _mask_of(mask: Tensor | None, heads: slice) -> Tensor | None:
    if mask is None:
        return None
    own = mask[:, heads] if mask.dim() == 4 and mask.shape[1] > 1 else mask
    return own.float() if own.is_floating_point() else own


def _whole(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of small tensors, by way of float32 copies of them all."""

    def work(*args: Any, **kwargs: Any) -> Any:
        dtype = next(argument.dtype for argument in args if isinstance(argument, Tensor))

        def wide(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype == dtype else tensor

        results = operation(*tree_map_only(Tensor, wide, args), **tree_map_only(Tensor, wide, kwargs))
        return tree_map_only(Tensor, lambda tensor: tensor.to(dtype), results)

    return work


_WORKS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _product,
    _aten.addmm.default: _added_product,
    _aten.mv.default: _vector_product,
    _aten.bmm.default: _batched_product,
    _aten.baddbmm.default: _added_batched_product,
    _aten._grouped_mm.default: _grouped_product,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    **{
        operation: _whole(operation)
        for operation in (
            _aten.addmv.default,
            _aten.dot.default,
            _aten.convolution.default,
            _aten.convolution_backward.default,
        )
    },
}
