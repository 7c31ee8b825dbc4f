"""Host memory for a schedule's pools, reserved before the first step."""

from collections.abc import Mapping

from torch import Tensor

from greedysnake.schedule import Buffer, Pool, Tier
from greedysnake.storage import BLOCK_BYTES, aligned_empty, round_up

ACTIVATION_POOLS = frozenset({"boundary", "boundary_gradient", "norm"})
"""Pools whose content is tensors that torch allocates; the rest is carved from aligned memory."""


class Buffers:
    """Page-aligned memory by buffer: every slot of every host pool that is not made of activations."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._memory: dict[Buffer, Tensor] = {}
        for name, pool in pools.items():
            if pool.tier == Tier.HOST and name not in ACTIVATION_POOLS:
                for slot, size in enumerate(pool.slot_bytes):
                    if size:
                        self._memory[Buffer(name, slot)] = aligned_empty(round_up(size, BLOCK_BYTES))

    def __getitem__(self, buffer: Buffer) -> Tensor:
        """The buffer's memory, uint8."""
        return self._memory[buffer]
