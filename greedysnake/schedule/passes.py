"""The visits that a schedule pays to a unit: forward, head and backward.

A visit serves the micro-batches of one group: all of a step (vertical), one (horizontal), or some.
"""

from collections.abc import Sequence

from greedysnake.schedule.builder import ScheduleBuilder
from greedysnake.schedule.operations import Buffer, Kind, Resource, Tier


class Passes:
    """Appends visits to ``build``; keeps track of where each boundary is."""

    def __init__(self, build: ScheduleBuilder) -> None:
        self._build = build
        self._together = build.choices.together(build.shape)
        self._boundary: dict[tuple[int, int], Buffer] = {}  # output of a unit, by micro-batch
        self._away: dict[tuple[int, int], Buffer] = {}  # where a boundary that left is kept
        self._used: dict[tuple[int, int], int] = {}  # the forward that used a boundary that leaves
        self._kept: dict[tuple[int, int], Buffer] = {}  # activations that need not be recomputed

    def forward(self, unit: int, order: Sequence[int], *, first: bool, keep: bool = True) -> None:
        """Micro-batches through an embedding or decoder unit.

        Args:
            unit: embedding or decoder unit.
            order: the micro-batches.
            first: whether its delayed updates come before, and its part of a snapshot.
            keep: whether a backward follows, which needs the boundaries again from the first trained unit on.
        """
        build = self._build
        needed_from = build.shape.first_trained - 1 if keep else build.units
        build.load_weights(unit)
        if first:
            build.update_delayed(unit)
        build.prefetch_weights(unit + 1)
        weights = build.compute_weights(unit)
        leaves = unit >= needed_from and build.choices.boundary_leaves(unit, build.units)
        inputs_leave = unit - 1 < needed_from or (unit > 0 and build.choices.boundary_leaves(unit - 1, build.units))
        for m in order:
            inputs = [self._boundary[unit - 1, m]] if unit else []
            output = self._boundary[unit, m] = build.take("activation")
            kept = []
            if keep and build.choices.keeps(unit, m, build.shape):
                kept = [build.take("kept_activation")]
                self._kept[unit, m] = kept[0]
            index = build.emit(
                Kind.FORWARD,
                Resource.COMPUTE,
                unit=unit,
                micro_batch=m,
                reads=[weights, *inputs],
                writes=[output, *kept],
            )
            self._used[unit - 1, m] = index
            if leaves:
                self._leave(unit, m)
            if inputs_leave:
                for boundary in inputs:
                    build.release(boundary)
        build.drop_weights(unit)

    def head(self, order: Sequence[int], *, first: bool, last: bool) -> None:
        """Final norm, output projection, loss and their backward, one micro-batch at a time."""
        build = self._build
        unit = build.units - 1
        build.load_weights(unit)
        if first:
            build.update_delayed(unit)
            build.commit()
        goes_on = build.shape.first_trained < unit
        weights = [build.compute_weights(unit)]
        gradient = build.begin_gradient(unit, first=first)
        gradients = [] if gradient is None else [gradient]
        if build.shape.tied:
            weights.append(build.compute_weights(0))
        elif goes_on and build.backward_loads(unit - 1, last=last):
            build.prefetch_weights(unit - 1)
        if build.shape.tied_gradient:
            gradients.append(build.begin_tied_gradient(first=first))
        for m in order:
            boundary = self._boundary.pop((unit - 1, m))
            build.emit(
                Kind.HEAD,
                Resource.COMPUTE,
                unit=unit,
                micro_batch=m,
                reads=[*weights, boundary, *gradients],
                writes=[*gradients, *([self._flow(m)] if goes_on else [])],
            )
            build.release(boundary)
        if build.shape.tied:
            build.drop_weights(0)
        if build.shape.tied_gradient:
            build.end_tied_gradient(gradients[-1], first=first)
        build.end_gradient(unit, gradient, last=last)
        build.drop_weights(unit)

    def loss(self, order: Sequence[int]) -> None:
        """Final norm, output projection and loss, without backward."""
        build = self._build
        unit = build.units - 1
        weights = [build.compute_weights(unit), *([build.compute_weights(0)] if build.shape.tied else [])]
        for m in order:
            boundary = self._boundary.pop((unit - 1, m))
            build.emit(Kind.LOSS, Resource.COMPUTE, unit=unit, micro_batch=m, reads=[*weights, boundary])
            build.release(boundary)
        build.drop_weights(0)
        build.drop_weights(unit)

    def backward(self, unit: int, order: Sequence[int], *, first: bool, last: bool) -> None:
        """Recompute, as far as needed, and backward of micro-batches; after the ``last`` ones, the unit's updates."""
        build = self._build
        goes_on = build.shape.first_trained < unit
        weights = [build.compute_weights(unit)] if build.shape.units[unit].backward_needs_weights else []
        gradient = build.begin_gradient(unit, first=first)
        gradients = [] if gradient is None else [gradient]
        if goes_on and build.backward_loads(unit - 1, last=last):
            build.prefetch_weights(unit - 1)
        for m in order:
            inputs = [self._arrive(unit - 1, m)] if unit else []
            kept = [self._kept.pop((unit, m))] if (unit, m) in self._kept else []
            build.emit(
                Kind.BACKWARD,
                Resource.COMPUTE,
                unit=unit,
                micro_batch=m,
                reads=[*weights, *inputs, *kept, *gradients, self._flow(m)],
                writes=[*gradients, *([self._flow(m)] if goes_on else [])],
            )
            for buffer in (*inputs, *kept):
                build.release(buffer)
            if not goes_on:
                build.release(self._flow(m))
        build.end_gradient(unit, gradient, last=last)
        build.drop_weights(unit)

    def _flow(self, m: int) -> Buffer:
        """The gradient of a boundary on its way back through the units."""
        return Buffer("boundary_gradient", m % self._together)

    def _leave(self, unit: int, m: int) -> None:
        """Copy a boundary to host memory, and from there to SSD if that is its place."""
        build = self._build
        kept = build.take("boundary")
        size = build.shape.boundary_bytes
        build.emit(
            Kind.COPY_BOUNDARY_OUT,
            Resource.D2H if build.choices.separate_device else Resource.CPU,
            unit=unit,
            micro_batch=m,
            reads=[self._boundary[unit, m]],
            writes=[kept],
            bytes=size,
        )
        self._away[unit, m] = kept
        if build.choices.boundary_tier(unit, build.units) == Tier.SSD:
            home = self._away[unit, m] = Buffer("ssd_boundary", unit * self._together + m % self._together)
            build.emit(
                Kind.STORE_BOUNDARY,
                Resource.SSD_WRITE,
                unit=unit,
                micro_batch=m,
                reads=[kept],
                writes=[home],
                bytes=size,
            )
            build.release(kept)

    def _arrive(self, unit: int, m: int) -> Buffer:
        """A boundary that the backward needs, brought back if it left."""
        build = self._build
        if (unit, m) not in self._away:
            return self._boundary.pop((unit, m))
        kept, size = self._away.pop((unit, m)), build.shape.boundary_bytes
        if kept.pool == "ssd_boundary":
            home, kept = kept, build.take("boundary")
            build.emit(
                Kind.LOAD_BOUNDARY,
                Resource.SSD_READ,
                unit=unit,
                micro_batch=m,
                reads=[home],
                writes=[kept],
                bytes=size,
            )
            build.release(home)
        slot = build.take("activation")
        build.emit(
            Kind.COPY_BOUNDARY_IN,
            Resource.H2D if build.choices.separate_device else Resource.CPU,
            unit=unit,
            micro_batch=m,
            reads=[kept],
            writes=[slot],
            bytes=size,
            also_after=[self._used[unit, m]],  # the activation itself, emptied after its use in the forward
        )
        build.release(kept)
        return slot
