"""A float32 master weight kept as a bfloat16 weight and a 16-bit remainder, losslessly.

``bits(weight) = (bits(master) + 2^15) >> 16`` and ``remainder = bits(master) - (bits(weight) << 16)``,
which always fits 16 signed bits. Round-to-nearest-even would not do: at an exact tie two masters would
share one code.
"""

import torch
from torch import Tensor

_PART = 2**18
"""Elements joined at once: torch makes int32 copies of 16-bit ones. Those of a whole chunk took 80 MiB, and longer."""


def join_master(weights: Tensor, remainders: Tensor, out: Tensor) -> Tensor:
    """Master weights (float32, into ``out``) of bfloat16 ``weights`` and int16 ``remainders``, all [elements]."""
    whole = (out.view(torch.int32), weights.view(torch.int16), remainders)
    for bits, high, low in zip(*(tensor.split(_PART) for tensor in whole), strict=True):
        bits.copy_(high).mul_(1 << 16).add_(low)
    return out


def round_master(master: Tensor, weights: Tensor) -> None:
    """Write float32 ``master`` as the bfloat16 ``weights`` that :func:`split_master` makes of it; it is kept."""
    for bits, high in zip(master.view(torch.int32).split(_PART), weights.view(torch.int16).split(_PART), strict=True):
        high.copy_(bits.add(1 << 15).bitwise_right_shift_(16))


def split_master(master: Tensor, weights: Tensor, remainders: Tensor) -> None:
    """Write float32 ``master`` as bfloat16 ``weights`` and int16 ``remainders``; ``master`` is used up."""
    bits = master.view(torch.int32)
    remainders.copy_(bits)  # keeps the low 16 bits
    bits.add_(1 << 15).bitwise_right_shift_(16)
    weights.view(torch.int16).copy_(bits)
