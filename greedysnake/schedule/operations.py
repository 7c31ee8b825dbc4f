"""What a step is made of: operations on named buffers, as frozen data.

A schedule says *what* happens, *where* (which resource), on *which buffers* and *after what*. It knows
nothing of tensors or files: the executor runs it, a simulator can time it, a picture can show it, and
:mod:`greedysnake.schedule.validate` proves that it never races, all from the same list.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Resource(StrEnum):
    """What an operation occupies; operations of one resource run in the order of the schedule."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    SSD_READ = "ssd_read"
    SSD_WRITE = "ssd_write"
    CPU = "cpu"


class Tier(StrEnum):
    """Where bytes live."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"


class Kind(StrEnum):
    """What an operation does."""

    LOAD_WEIGHTS = "load_weights"
    COPY_WEIGHTS = "copy_weights"  # host to device
    FORWARD = "forward"
    HEAD = "head"  # forward, loss and backward of the head, one micro-batch
    LOSS = "loss"  # forward and loss of the head, without backward
    BACKWARD = "backward"  # recompute, where nothing was kept, and backward of a unit, one micro-batch
    COPY_BOUNDARY_OUT = "copy_boundary_out"  # from where it was computed to host memory for transfers
    STORE_BOUNDARY = "store_boundary"
    LOAD_BOUNDARY = "load_boundary"
    COPY_BOUNDARY_IN = "copy_boundary_in"
    ZERO_GRADIENT = "zero_gradient"
    COPY_GRADIENT_IN = "copy_gradient_in"  # a partial sum, host to device
    COPY_GRADIENT_OUT = "copy_gradient_out"  # device to host
    ADD_TIED_GRADIENT = "add_tied_gradient"
    GRADIENT_NORM = "gradient_norm"
    TOTAL_NORM = "total_norm"
    HOLD_GRADIENT = "hold_gradient"  # keep a chunk's gradient until its update
    LOAD_GRADIENT = "load_gradient"
    LOAD_STATE = "load_state"
    UPDATE = "update"  # AdamW on one chunk
    STORE_STATE = "store_state"  # a chunk's new weights and state
    STORE_RESIDENT = "store_resident"  # what of a chunk stays in host memory, for a snapshot
    COMMIT = "commit"  # makes the state after the step before the one that survives a crash


class Buffer(NamedTuple):
    """One slot of a pool, or a part of one: the unit of memory that operations read, write and release.

    A tuple, as it is made, hashed and compared by the million when a plan is searched.

    Attributes:
        pool, slot: which slot.
        part: which part of it, where operations on different parts do not mind each other; -1 for all of it.
    """

    pool: str
    slot: int
    part: int = -1

    @property
    def whole(self) -> "Buffer":
        """The slot that it is, or is a part of."""
        return self if self.part < 0 else Buffer(self.pool, self.slot)

    def at_part(self, part: int) -> "Buffer":
        """A part of the same slot."""
        return Buffer(self.pool, self.slot, part)

    def overlaps(self, other: "Buffer") -> bool:
        """Whether two buffers share memory."""
        same_slot = self.slot == other.slot and self.pool == other.pool
        return same_slot and (self.part < 0 or other.part < 0 or self.part == other.part)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Memory reserved before the first step: ``slot_bytes[i]`` bytes for slot ``i``, all in one tier."""

    tier: Tier
    slot_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(self.slot_bytes)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One entry of a schedule.

    Attributes:
        index: position in the schedule.
        unit: unit it works on, ``None`` for the whole model.
        micro_batch: micro-batch it works on, if any.
        chunk: optimizer chunk of the unit, if any.
        reads: buffers whose content it needs.
        writes: buffers that it fills or changes (a buffer changed in place is in ``reads`` too).
        releases: buffers whose content nobody needs after it.
        after: indices of the operations that must have ended before it starts.
        bytes: bytes it moves, for operations that move any.
    """

    index: int
    kind: Kind
    resource: Resource
    unit: int | None = None
    micro_batch: int | None = None
    chunk: int | None = None
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    releases: tuple[Buffer, ...] = ()
    after: tuple[int, ...] = ()
    bytes: int = 0

    @property
    def keeps(self) -> bool:
        """Whether a forward leaves activations for the backward, or a backward finds them and need not recompute."""
        return any(buffer.pool == "kept_activation" for buffer in (*self.reads, *self.writes))

    def __str__(self) -> str:
        words = [f"{self.index}: {self.kind}"]
        words += [f"unit {self.unit}"] if self.unit is not None else []
        words += [f"micro-batch {self.micro_batch}"] if self.micro_batch is not None else []
        words += [f"chunk {self.chunk}"] if self.chunk is not None else []
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The ordered operations of one step.

    Attributes:
        name: the builder's name, ``"vertical"`` or ``"horizontal"``.
        operations: what happens, in an order in which it could all be done one by one.
        pools: the memory that it happens in, by pool name.
        live_in: buffers that hold content when the step begins (SSD state, delayed gradients).
        live_out: buffers that hold content when it has ended.
    """

    name: str
    operations: tuple[Operation, ...]
    pools: dict[str, Pool] = field(hash=False)
    live_in: frozenset[Buffer]
    live_out: frozenset[Buffer]

    def reserved_bytes(self, tier: Tier) -> int:
        """Bytes of all pools of a tier: what is reserved, whatever is live."""
        return sum(pool.bytes for pool in self.pools.values() if pool.tier == tier)

    def backward_order(self, unit: int) -> list[int]:
        """Micro-batches in the order in which their gradients are added for ``unit``."""
        kinds = (Kind.BACKWARD, Kind.HEAD)
        return [
            operation.micro_batch
            for operation in self.operations
            if operation.kind in kinds and operation.unit == unit and operation.micro_batch is not None
        ]
