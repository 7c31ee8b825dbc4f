"""The norm of a gradient that is never in one place, and the clipping that follows from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """Norm of the whole gradient.

    Attributes:
        norm: two-norm over all parameters, before clipping and without the loss scale.
        clip: factor that clipping scales the gradient by, at most 1.
        finite: whether the norm is: no gradient is infinite or NaN, nor so large that the norm overflows.
    """

    norm: float
    clip: float
    finite: bool


def parameter_norms(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Two-norm of each parameter's gradient, float32 scalars."""
    return [torch.linalg.vector_norm(gradient) for gradient in gradients]


def total_norm(norms: Sequence[Tensor], max_grad_norm: float | None, loss_scale: float = 1.0) -> GradientNorm:
    """Norm and clipping of the whole gradient, in the arithmetic of ``torch.nn.utils.clip_grad_norm_``.

    Args:
        norms: two-norm of every parameter's gradient, in the model's order.
        max_grad_norm: largest norm, None for no clipping.
        loss_scale: factor that the gradients carry, a power of two; the result is without it.
    """
    total = torch.linalg.vector_norm(torch.stack(list(norms))) / loss_scale
    clip = 1.0
    if max_grad_norm is not None:
        clip = torch.clamp(max_grad_norm / (total + 1e-6), max=1.0).item()
    return GradientNorm(norm=total.item(), clip=clip, finite=bool(total.isfinite()))
