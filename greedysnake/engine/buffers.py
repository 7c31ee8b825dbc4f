"""Memory for a schedule's pools, reserved before the first step."""

from collections.abc import Mapping

from torch import Tensor

from greedysnake.engine.devices import Device
from greedysnake.schedule import Buffer, Pool, Tier
from greedysnake.storage import BLOCK_BYTES, aligned_empty, round_up

ACTIVATION_POOLS = frozenset({"activation", "boundary_gradient", "kept_activation", "norm"})
"""Pools whose content is tensors that torch allocates; the rest is reserved here."""

HOST_ONLY_POOLS = frozenset({"state", "resident_state", "held", "gradient_chunk"})
"""Host pools that nothing is copied from or to on a separate device, so that they need not be made ready for it."""


class Buffers:
    """Memory by buffer: every slot of every device and host pool that is not made of activations."""

    def __init__(self, pools: Mapping[str, Pool], device: Device) -> None:
        self._memory: dict[Buffer, Tensor] = {}
        for name, pool in pools.items():
            if name in ACTIVATION_POOLS or pool.tier == Tier.SSD:
                continue
            for slot, size in enumerate(pool.slot_bytes):
                count = round_up(size, BLOCK_BYTES)
                if count and pool.tier == Tier.DEVICE:
                    self._memory[Buffer(name, slot)] = device.allocate(count)
                elif count:
                    self._memory[Buffer(name, slot)] = aligned_empty(count)
                    if name not in HOST_ONLY_POOLS:
                        device.prepare_host(self._memory[Buffer(name, slot)])

    def __getitem__(self, buffer: Buffer) -> Tensor:
        """The buffer's memory, uint8; of a part, that of the whole slot."""
        return self._memory[buffer.whole]

    def __contains__(self, buffer: Buffer) -> bool:
        """Whether the buffer has memory here."""
        return buffer.whole in self._memory
