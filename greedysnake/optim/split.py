"""A float32 master weight kept as a bfloat16 weight and a 16-bit remainder, losslessly.

``bits(weight) = (bits(master) + 2^15) >> 16`` and ``remainder = bits(master) - (bits(weight) << 16)``,
which always fits 16 signed bits. Round-to-nearest-even would not do: at an exact tie two masters would
share one code.
"""

import torch
from torch import Tensor


def join_master(weights: Tensor, remainders: Tensor, out: Tensor) -> Tensor:
    """Master weights (float32, into ``out``) of bfloat16 ``weights`` and int16 ``remainders``, all [elements]."""
    bits = out.view(torch.int32)
    bits.copy_(weights.view(torch.int16)).mul_(1 << 16).add_(remainders)
    return out


def split_master(master: Tensor, weights: Tensor, remainders: Tensor) -> None:
    """Write float32 ``master`` as bfloat16 ``weights`` and int16 ``remainders``; ``master`` is used up."""
    bits = master.view(torch.int32)
    remainders.copy_(bits)  # keeps the low 16 bits
    bits.add_(1 << 15).bitwise_right_shift_(16)
    weights.view(torch.int16).copy_(bits)
