"""Other systems' orders as schedules, so that the same simulator compares them.

``zero_infinity`` is the order of ZeRO-Infinity (arXiv 2104.07857) as DeepSpeed carries it out: micro-batch by
micro-batch through all units; 16-bit gradients go to the host and are added up there; after the last micro-batch
the whole sum goes to SSD in float32, and the optimizer reads it back with the state, unit by unit. It writes 18
bytes a parameter and step and reads 16, besides 4 for each micro-batch; DeepSpeed's own counters say the same.
``zero_offload`` (arXiv 2101.06840) is the same with everything in host memory.
"""

from greedysnake.schedule import Buffer, Choices, Kind, Pool, Resource, Schedule, StepShape, Tier, UnitShape
from greedysnake.schedule.tape import OperationTape

LOW_BYTES = 2
"""Bytes of a gradient on its way to the host."""


class _Baseline(OperationTape):
    """Emits the order; ``on_ssd`` says whether weights, state and complete gradients have their home on SSD."""

    def __init__(self, shape: StepShape, *, resident_weights: float, on_ssd: bool) -> None:
        self.shape = shape
        self.on_ssd = on_ssd
        self.resident = Choices(resident_weights=resident_weights)
        chunks = [chunk for unit in shape.units for chunk in unit.chunks]
        self.first = [0]
        for unit in shape.units:
            self.first.append(self.first[-1] + len(unit.chunks))
        weights = max(unit.weight_bytes for unit in shape.units)
        gradients = max(unit.gradient_bytes for unit in shape.units)
        boundaries = len(shape.units) - 1

        def pool(tier: Tier, size: int, slots: int) -> Pool:
            return Pool(tier=tier, slot_bytes=(size,) * slots)

        home = Tier.SSD if on_ssd else Tier.HOST
        super().__init__(
            {
                "weights": pool(Tier.HOST, weights, 3 if on_ssd else 0),
                "device_weights": pool(Tier.DEVICE, weights, 3),
                "device_gradient": pool(Tier.DEVICE, gradients * LOW_BYTES // 4, 2),
                "activation": pool(Tier.DEVICE, shape.boundary_bytes, 4),
                "boundary": pool(Tier.HOST, shape.boundary_bytes, boundaries),
                "boundary_gradient": pool(Tier.DEVICE, shape.boundary_bytes, shape.micro_batches),
                "state": pool(Tier.HOST, max(chunk.state_bytes + chunk.gradient_bytes for chunk in chunks), 4),
                "gradient": pool(Tier.HOST, 0, 0),
                "gradient_chunk": pool(Tier.HOST, 0, 0),
                "kept_activation": pool(Tier.DEVICE, 0, 0),
                "norm": pool(Tier.HOST, 8, 1),
                "sums": Pool(
                    tier=Tier.HOST,
                    slot_bytes=tuple(unit.gradient_bytes * LOW_BYTES // 4 for unit in shape.units),
                ),
                "home_weights": Pool(tier=home, slot_bytes=tuple(unit.weight_bytes for unit in shape.units)),
                "home_state": Pool(tier=home, slot_bytes=tuple(chunk.state_bytes for chunk in chunks)),
                "held": Pool(tier=home, slot_bytes=tuple(chunk.gradient_bytes for chunk in chunks)),
            }
        )
        self.live = {
            *(Buffer("home_weights", unit) for unit in range(len(shape.units))),
            *(Buffer("home_state", chunk) for chunk in range(len(chunks))),
        }

    def weights(self, unit: int) -> Buffer:
        """A unit's weights on the device, from SSD unless they stay in host memory."""
        size, source = self.shape.units[unit].weight_bytes, Buffer("home_weights", unit)
        if self.on_ssd and not self.resident.weights_resident(unit):
            slot = self.take("weights")
            self.emit(Kind.LOAD_WEIGHTS, Resource.SSD_READ, unit=unit, reads=[source], writes=[slot], bytes=size)
            source = slot
        target = self.take("device_weights")
        self.emit(Kind.COPY_WEIGHTS, Resource.H2D, unit=unit, reads=[source], writes=[target], bytes=size)
        if source.pool == "weights":
            self.release(source)
        return target

    def gradient(self, unit: int, slot: Buffer, *, first: bool, last: bool) -> None:
        """A unit's gradient of one micro-batch to the host, where it is added up; the whole sum goes to its home."""
        size, total = self.shape.units[unit].gradient_bytes * LOW_BYTES // 4, Buffer("sums", unit)
        if not size:
            self.release(slot)
            return
        arrived = [] if first else [total]
        self.emit(Kind.COPY_GRADIENT_OUT, Resource.D2H, unit=unit, reads=[slot, *arrived], writes=[total], bytes=size)
        self.release(slot)
        self.emit(Kind.HOLD_GRADIENT, Resource.CPU, unit=unit, reads=[total], writes=[total], bytes=size)
        if last and self.on_ssd:
            for index, chunk in enumerate(self.shape.units[unit].chunks):
                self.emit(
                    Kind.HOLD_GRADIENT,
                    Resource.SSD_WRITE,
                    unit=unit,
                    chunk=index,
                    reads=[total],
                    writes=[Buffer("held", self.first[unit] + index)],
                    bytes=chunk.gradient_bytes,
                )

    def optimizer(self) -> None:
        """Every chunk's update, when all gradients are there."""
        sums = [Buffer("sums", unit) for unit, sizes in enumerate(self.shape.units) if sizes.chunks]
        self.emit(Kind.TOTAL_NORM, Resource.CPU, reads=sums, writes=[Buffer("norm", 0)])
        for unit, sizes in enumerate(self.shape.units):
            for index in range(len(sizes.chunks)):
                if self.on_ssd:
                    self._update_from_ssd(unit, index)
                else:
                    self._update_in_memory(unit, index)
            if sizes.chunks:
                self.release(Buffer("sums", unit))
        self.release(Buffer("norm", 0))

    def _update_in_memory(self, unit: int, chunk: int) -> None:
        home = [Buffer("home_state", self.first[unit] + chunk), Buffer("home_weights", unit)]
        reads = [Buffer("sums", unit), Buffer("norm", 0), *home]
        self.emit(Kind.UPDATE, Resource.CPU, unit=unit, chunk=chunk, reads=reads, writes=home)

    def _update_from_ssd(self, unit: int, chunk: int) -> None:
        sizes, number = self.shape.units[unit].chunks[chunk], self.first[unit] + chunk
        state, held, weights = Buffer("home_state", number), Buffer("held", number), Buffer("home_weights", unit)
        norm, slot = Buffer("norm", 0), self.take("state")
        self.emit(
            Kind.LOAD_STATE,
            Resource.SSD_READ,
            unit=unit,
            chunk=chunk,
            reads=[state, held, norm],
            writes=[slot],
            bytes=sizes.gradient_bytes + sizes.state_bytes,
        )
        self.release(held)
        self.emit(Kind.UPDATE, Resource.CPU, unit=unit, chunk=chunk, reads=[slot], writes=[slot])
        self.emit(
            Kind.STORE_STATE,
            Resource.SSD_WRITE,
            unit=unit,
            chunk=chunk,
            reads=[slot],
            writes=[state, weights],
            bytes=sizes.state_bytes + sizes.weight_bytes,
        )
        self.release(slot)


def build_baseline(shape: StepShape, *, resident_weights: float = 0.0, on_ssd: bool = True) -> Schedule:
    """One step in the order of ZeRO-Infinity, or of ZeRO-Offload with ``on_ssd`` false.

    Args:
        shape: sizes of the step; its chunks' state should be 12 bytes a parameter, a whole master and two moments.
        resident_weights: part of all units whose weights stay in host memory.
        on_ssd: whether weights and state have their home on SSD.
    """
    build = _Baseline(shape, resident_weights=resident_weights, on_ssd=on_ssd)
    for m in range(shape.micro_batches):
        kept = _forward(build, m)
        _backward(build, m, kept)
    build.optimizer()
    live = frozenset(build.live)
    name = "zero-infinity" if on_ssd else "zero-offload"
    return Schedule(name=name, operations=build.operations(), pools=build.pools, live_in=live, live_out=live)


def _forward(build: _Baseline, m: int) -> dict[int, Buffer]:
    """A micro-batch through all units before the head; where its boundaries are kept, the last one on the device."""
    kept: dict[int, Buffer] = {}
    inputs: list[Buffer] = []
    last = len(build.shape.units) - 2
    for unit in range(last + 1):
        weights, output = build.weights(unit), build.take("activation")
        build.emit(Kind.FORWARD, Resource.COMPUTE, unit=unit, micro_batch=m, reads=[weights, *inputs], writes=[output])
        for used in (weights, *inputs):
            build.release(used)
        inputs, kept[unit] = [output], output
        if unit < last:
            kept[unit] = build.take("boundary")
            build.emit(
                Kind.COPY_BOUNDARY_OUT,
                Resource.D2H,
                unit=unit,
                micro_batch=m,
                reads=[output],
                writes=[kept[unit]],
                bytes=build.shape.boundary_bytes,
            )
    return kept


def _backward(build: _Baseline, m: int, kept: dict[int, Buffer]) -> None:
    """A micro-batch's head and backward, each unit's gradient to the host."""
    shape, flow = build.shape, Buffer("boundary_gradient", m)
    head = len(shape.units) - 1
    for unit in range(head, -1, -1):
        needed = unit == head or shape.units[unit].backward_needs_weights
        used = [build.weights(unit)] if needed else []
        if unit:
            used.append(_arrive(build, m, unit - 1, kept[unit - 1]))
        gradient = build.take("device_gradient")
        build.emit(
            Kind.HEAD if unit == head else Kind.BACKWARD,
            Resource.COMPUTE,
            unit=unit,
            micro_batch=m,
            reads=[*used, *([] if unit == head else [flow])],
            writes=[gradient, flow],
        )
        for slot in used:
            build.release(slot)
        build.gradient(unit, gradient, first=m == 0, last=m == shape.micro_batches - 1)
    build.release(flow)


def _arrive(build: _Baseline, m: int, unit: int, kept: Buffer) -> Buffer:
    """A boundary on the device."""
    if kept.pool == "activation":
        return kept
    slot = build.take("activation")
    build.emit(
        Kind.COPY_BOUNDARY_IN,
        Resource.H2D,
        unit=unit,
        micro_batch=m,
        reads=[kept],
        writes=[slot],
        bytes=build.shape.boundary_bytes,
    )
    build.release(kept)
    return slot


def untied(shape: StepShape) -> StepShape:
    """The same sizes with a head of its own weights, as the baselines load a tied embedding for the head."""
    if not shape.tied:
        return shape
    embedding = shape.units[0]
    head = UnitShape(chunks=shape.units[-1].chunks, frozen_weight_bytes=embedding.weight_bytes)
    return StepShape(
        units=(*shape.units[:-1], head), micro_batches=shape.micro_batches, boundary_bytes=shape.boundary_bytes
    )
