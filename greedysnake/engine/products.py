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
_ATTENTION_ELEMENTS = 2**20  # of each tensor of the rows and heads that are computed at once, likewise
_FEW_ROWS = 8  # fewer, as in decoding, are multiplied faster by torch's own kernel, whose sums are in float32 too

_aten = torch.ops.aten


def computing_products(choice: str) -> AbstractContextManager[object]:
    """While it is open, what this thread computes on the CPU multiplies matrices as ``choice``, of CHOICES, says."""
    dtypes = float32_types(choice)
    return Float32Products(dtypes) if dtypes else nullcontext()


def float32_types(choice: str) -> frozenset[torch.dtype]:
    """The 16-bit types whose matrices are multiplied by way of float32."""
    if choice != "auto":
        return frozenset((torch.bfloat16, torch.float16) if choice == "float32" else ())
    if not torch.backends.mkldnn.is_available():
        return frozenset((torch.bfloat16, torch.float16))
    fast = {  # what torch's own dispatch asks
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, is_fast in fast.items() if not is_fast())


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
    _check(left, right, added)
    if left.shape[0] < _FEW_ROWS and right.stride(0) == 1 and added is None:
        return _aten.mm(left, right)
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


def _check(left: Tensor, right: Tensor, added: Tensor | None = None) -> None:
    """Refuse what torch refuses: blocks of matrices that do not fit together might."""
    types = {tensor.dtype for tensor in (left, right, added) if tensor is not None}
    if len(types) > 1:
        raise RuntimeError(f"expected matrices of one dtype, got {', '.join(sorted(map(str, types)))}")
    if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
        raise RuntimeError(f"shapes cannot be multiplied ({tuple(left.shape)} and {tuple(right.shape)})")


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
    _check(left, right, added)
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


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, *options: Any, **named: Any) -> Tensor:
    """Products of experts: group g is the rows, columns or terms from one entry of ``offs`` to the next."""
    if options or named:  # torch has none for the CPU, and says so
        return _aten._grouped_mm(left, right, offs, *options, **named)
    if offs is None:
        return _batched_product(left, right)
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if left.dim() == 2 and right.dim() == 2:
        out = left.new_empty(len(groups), left.shape[0], right.shape[1])
        for index, group in enumerate(groups):
            out[index] = _product(left[:, group], right[group])
    elif left.dim() == 2:
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
    out, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    for rows, heads, shared in _parts(query, key, value, attn_mask):
        out[rows, heads], sums[rows, heads] = _aten._scaled_dot_product_flash_attention_for_cpu(
            query[rows, heads].float(),
            *(tensor[rows, shared].float() for tensor in (key, value)),
            dropout_p,
            is_causal,
            attn_mask=_mask_of(attn_mask, rows, heads),
            scale=scale,
        )
    return out, sums


def _attention_backward(*args: Any, attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, ...]:
    """Gradients of query, key and value from the output's, these three, the output, its sums, and options."""
    gradient, query, key, value, out, sums, *options = args
    inputs = (query, key, value)
    gradients = tuple(_by_token(tensor) for tensor in inputs)
    for rows, heads, shared in _parts(*inputs, attn_mask):
        some = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient[rows, heads].float(),
            query[rows, heads].float(),
            *(tensor[rows, shared].float() for tensor in (key, value)),
            out[rows, heads].float(),
            sums[rows, heads],
            *options,
            attn_mask=_mask_of(attn_mask, rows, heads),
            scale=scale,
        )
        for whole, own, part in zip(gradients, (heads, shared, shared), some, strict=True):
            whole[rows, own] = part
    return gradients


def _by_token(like: Tensor) -> Tensor:
    """Memory for [B, heads, T, d], laid out as torch lays out these gradients."""
    rows, heads, tokens, width = like.shape
    return like.new_empty(rows, tokens, heads, width).transpose(1, 2)


def _parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, heads, and heads of the keys that these share, to compute at once: few, but enough for all threads."""
    rows, count, shared = query.shape[0], query.shape[1], key.shape[1]
    each = max(1, *(tensor.shape[2] * tensor.shape[3] for tensor in (query, key, value)))
    sharing, fitting = count // max(1, shared), max(1, _ATTENTION_ELEMENTS // each)
    rows_at_once = max(1, fitting // max(1, count))
    if mask is not None:
        rows_at_once = max(1, min(rows_at_once, _ATTENTION_ELEMENTS * len(mask) // max(1, mask.numel())))
    keys_at_once = max(1, max(fitting, torch.get_num_threads()) // max(1, sharing))
    for some in _blocks(rows, rows_at_once):
        for keys in _blocks(shared, keys_at_once):
            yield some, slice(keys.start * sharing, keys.stop * sharing), keys


def _mask_of(mask: Tensor | None, rows: slice, heads: slice) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() == 4:
        mask = mask[rows if mask.shape[0] > 1 else slice(None), heads if mask.shape[1] > 1 else slice(None)]
    return mask.float() if mask.is_floating_point() else mask


def _whole(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation by way of float32 copies of all its tensors, which are small beside those of a layer's products."""

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
