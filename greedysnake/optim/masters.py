"""float32 master weights, kept as the weights themselves and what the state adds to them.

float32 weights are their own masters. A bfloat16 weight is the upper half of its master, and the state holds the
rest (``optim.split``). A float16 weight has another exponent than its master, so the state holds the whole master.
"""

import torch
from torch import Tensor

from greedysnake.optim.split import join_master, split_master


def read_master(weights: Tensor, added: Tensor, memory: Tensor) -> Tensor:
    """Master weights, float32 [elements].

    Args:
        weights: float32, bfloat16 or float16 [elements].
        added: uint8, what the state holds of the masters.
        memory: float32 [elements], used where the masters lie nowhere as such.

    Returns:
        A view of ``weights`` (float32), of ``added`` (float16) or of ``memory`` (bfloat16).
    """
    if weights.dtype == torch.float32:
        return weights
    if weights.dtype == torch.float16:
        return added.view(torch.float32)
    return join_master(weights, added.view(torch.int16), memory)


def write_master(master: Tensor, weights: Tensor, added: Tensor) -> None:
    """Write masters as weights and what the state holds of them; ``master`` may be what :func:`read_master` gave.

    float16 weights are the masters rounded to nearest, ties to even; bfloat16 ones as ``optim.split`` rounds.

    Args:
        master: float32 [elements], used up.
        weights: float32, bfloat16 or float16 [elements].
        added: uint8, as for :func:`read_master`.
    """
    if weights.dtype == torch.bfloat16:
        split_master(master, weights, added.view(torch.int16))
        return
    weights.copy_(master)
    if weights.dtype == torch.float16 and master.data_ptr() != added.data_ptr():
        added.view(torch.float32).copy_(master)
