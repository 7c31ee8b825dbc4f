"""float32 master weights, kept as the weights themselves and what the state adds to them.

float32 weights are their own masters. A bfloat16 weight is the upper half of its master, and the state holds the
rest (``optim.split``). A float16 weight has another exponent than its master, so the state holds the whole master; for
bfloat16 it can too, which learns the same and takes 2 B a parameter more.
"""

import torch
from torch import Tensor

from greedysnake.optim.split import join_master, round_master, split_master


def read_master(weights: Tensor, added: Tensor, memory: Tensor) -> Tensor:
    """Master weights, float32 [elements].

    Args:
        weights: float32, bfloat16 or float16 [elements].
        added: uint8, what the state holds of the masters.
        memory: float32 [elements], used where the masters lie nowhere as such.

    Returns:
        A view of ``weights`` (float32), of ``added`` (whole masters) or of ``memory`` (split ones).
    """
    if weights.dtype == torch.float32:
        return weights
    if _are_whole(added, weights):
        return added.view(torch.float32)
    return join_master(weights, added.view(torch.int16), memory)


def write_master(master: Tensor, weights: Tensor, added: Tensor) -> None:
    """Write masters as weights and what the state holds of them; ``master`` may be what :func:`read_master` gave.

    float16 weights are the masters rounded to nearest, ties to even; bfloat16 ones as ``optim.split`` rounds, whether
    split or not.

    Args:
        master: float32 [elements], used up.
        weights: float32, bfloat16 or float16 [elements].
        added: uint8, as for :func:`read_master`.
    """
    if weights.dtype == torch.float32:
        weights.copy_(master)
    elif _are_whole(added, weights):
        if weights.dtype == torch.bfloat16:
            round_master(master, weights)
        else:
            weights.copy_(master)
        if master.data_ptr() != added.data_ptr():
            added.view(torch.float32).copy_(master)
    else:
        split_master(master, weights, added.view(torch.int16))


def _are_whole(added: Tensor, weights: Tensor) -> bool:
    """Whether ``added`` are masters themselves."""
    return added.numel() == 4 * weights.numel()
