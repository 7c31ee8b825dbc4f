"""What each operation of a schedule costs on a machine: rates, and the seconds of each unit's computation.

Resources are not independent. Reads and writes share the disks, so each direction has a rate of its own and
a lower one while the other direction is busy too; computation and the optimizer share the cores of a machine
without a separate device.
"""

from dataclasses import dataclass, field

from greedysnake.schedule import Kind, Operation, Resource, StepShape

GRADIENT_ITEM_BYTES = 4
"""Gradients are summed in float32."""


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Bytes per second of all storage folders together.

    Attributes:
        read, write: with traffic in one direction only.
        mixed_read, mixed_write: of each direction while both are busy.
    """

    read: float
    write: float
    mixed_read: float
    mixed_write: float

    def __post_init__(self) -> None:
        if not 0 < self.mixed_read <= self.read or not 0 < self.mixed_write <= self.write:
            raise ValueError(f"disk rates must be positive, and no higher in mixed traffic than alone: {self}")


@dataclass(frozen=True, kw_only=True)
class Contention:
    """What computation, the host's optimizer and copies, and the disks take from each other.

    Attributes:
        compute, cpu: speed of computation and of optimizer and copies while both run, as shares of their speed alone.
        transfer: seconds of computation lost for each byte that is read or written, as its checksum and the kernel's
            work need a core. Each byte counts, whenever it moves: where computation waits, it loses nothing that
            would show.
    """

    compute: float = 1.0
    cpu: float = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.compute <= 1 or not 0 < self.cpu <= 1 or self.transfer < 0:
            raise ValueError(f"contention shares must lie above 0 and at most at 1, the rest not below 0: {self}")


@dataclass(frozen=True, kw_only=True)
class UnitSeconds:
    """Seconds of one unit's computation for one micro-batch.

    Attributes:
        forward: of its forward; of the head, forward and loss.
        backward: of recompute and backward; of the head, of its forward, loss and backward together.
        kept_forward, kept_backward: where the activations stay from forward to backward; None: they take the same
            forward, and the backward without the recompute.
    """

    forward: float
    backward: float
    kept_forward: float | None = None
    kept_backward: float | None = None

    def forward_if(self, *, kept: bool) -> float:
        """Of the forward."""
        return self.forward if self.kept_forward is None or not kept else self.kept_forward

    def backward_if(self, *, kept: bool) -> float:
        """Of the backward."""
        if not kept:
            return self.backward
        return max(0.0, self.backward - self.forward) if self.kept_backward is None else self.kept_backward


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What operations of a step cost.

    Attributes:
        disk: rates of the disks.
        h2d, d2h: bytes per second of copies to and from the device.
        copy: bytes per second of copies within host memory.
        device_fill: bytes per second at which the device clears its own memory.
        optimizer: parameters per second.
        units: computation of each unit.
        contention: between computation and the host's other work.
        overhead: seconds that an operation takes besides its work, by resource.
        step_overhead: seconds of a step outside its operations (commit, data).
    """

    disk: DiskRates
    h2d: float
    d2h: float
    copy: float
    device_fill: float
    optimizer: float
    units: tuple[UnitSeconds, ...]
    contention: Contention = Contention()
    overhead: dict[Resource, float] = field(default_factory=dict)
    step_overhead: float = 0.0

    def work(self, operation: Operation, shape: StepShape) -> float:
        """Seconds of an operation that has its resource, and what that resource shares, to itself."""
        return self._seconds(operation, shape) + self.overhead.get(operation.resource, 0.0)

    def _seconds(self, operation: Operation, shape: StepShape) -> float:
        kind, resource, unit = operation.kind, operation.resource, operation.unit
        if resource == Resource.SSD_READ:
            return operation.bytes / self.disk.read
        if resource == Resource.SSD_WRITE:
            return operation.bytes / self.disk.write
        if resource == Resource.H2D:
            return operation.bytes / self.h2d
        if resource == Resource.D2H:
            return operation.bytes / self.d2h
        if unit is None:
            return 0.0
        if kind in (Kind.FORWARD, Kind.LOSS):
            return self.units[unit].forward_if(kept=operation.keeps)
        if kind in (Kind.BACKWARD, Kind.HEAD):
            return self.units[unit].backward_if(kept=operation.keeps)
        if kind == Kind.UPDATE:
            chunk = shape.units[unit].chunks[operation.chunk or 0]
            return chunk.gradient_bytes / GRADIENT_ITEM_BYTES / self.optimizer
        if kind == Kind.ZERO_GRADIENT:
            return shape.units[unit].gradient_bytes / self.device_fill
        if kind == Kind.ADD_TIED_GRADIENT:
            return 1.5 * shape.units[unit].gradient_bytes / self.copy  # reads two, writes one
        if kind == Kind.GRADIENT_NORM:
            return 0.5 * shape.units[unit].gradient_bytes / self.copy  # a copy reads and writes
        return operation.bytes / self.copy
