"""Gradients of 16-bit parameters, added to float32 sums a piece at a time.

autograd alone would cast each gradient to a float32 tensor of its own before it adds it (``Tensor.grad_dtype``): 4 B a
parameter of memory that is new each time, whose page faults took a tenth of a large layer's backward on the CPU.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from greedysnake.models.reach import reached

_PIECE = 2**18
"""Elements cast at once on the CPU."""


class GradientSums:
    """Runs backwards whose gradients are added to the parameters' ``.grad``, float32.

    The sums are bit for bit autograd's own. A parameter that one backward reaches several times is left to autograd,
    which adds these gradients in float32 first.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._narrow = {id(p): p for p in parameters if p.requires_grad and p.dtype.itemsize < 4}
        self._sums: dict[int, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p in self._narrow.values()]

    def close(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()

    def backward(
        self,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None = None,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Go back from ``roots``, as ``torch.autograd.backward`` does."""
        uses = reached(roots) if self._narrow else {}
        once = (self._narrow.get(identity) for identity, times in uses.items() if times == 1)
        apart = [parameter for parameter in once if parameter is not None and parameter.grad is not None]
        try:
            for parameter in apart:
                self._sums[id(parameter)], parameter.grad = cast(Tensor, parameter.grad), None
                # whatever dtype comes is added: float32 where the weight scales float32 numbers
                parameter.grad_dtype = None
            torch.autograd.backward(roots, gradients, inputs=inputs)
        finally:
            for parameter in apart:
                total = self._sums.pop(id(parameter), None)
                if total is not None:
                    parameter.grad = None
                    parameter.grad_dtype = torch.float32
                    parameter.grad = total

    def _add(self, parameter: Tensor) -> None:
        total, gradient = self._sums.get(id(parameter)), parameter.grad
        if total is None or gradient is None:
            return  # autograd has added it
        parameter.grad = None
        for own, piece in _pieces(total, gradient):
            own.add_(piece)


def _pieces(total: Tensor, gradient: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Both in parts that follow on each other: on a GPU, whose kernels cast as they add, in one."""
    if gradient.device.type != "cpu" or gradient.numel() <= _PIECE:
        return [(total, gradient)]
    if total.is_contiguous() and gradient.is_contiguous():
        return zip(total.view(-1).split(_PIECE), gradient.view(-1).split(_PIECE), strict=True)
    rows = max(1, _PIECE * gradient.shape[0] // gradient.numel())
    return zip(total.split(rows), gradient.split(rows), strict=True)
