"""The three visits that a schedule pays to a unit: forward, head and backward.

The builders differ in which micro-batches one visit serves: all of them (vertical) or one (horizontal).
"""

from collections.abc import Sequence

from greedysnake.schedule.builder import ScheduleBuilder
from greedysnake.schedule.operations import Buffer, Kind, Resource, Tier


class Passes:
    """Appends visits to ``build``; keeps track of where each boundary is."""

    def __init__(self, build: ScheduleBuilder) -> None:
        self._build = build
        self._boundary: dict[tuple[int, int], Buffer] = {}  # output of a unit, by micro-batch
        self._used: dict[tuple[int, int], int] = {}  # the forward that used a boundary that goes to SSD
        self._spill = build.choices.boundaries == Tier.SSD

    def forward(self, unit: int, order: Sequence[int], *, first: bool, keep: bool = True) -> None:
        """Micro-batches through an embedding or decoder unit.

        Args:
            unit: embedding or decoder unit.
            order: the micro-batches.
            first: whether its delayed updates come before.
            keep: whether a backward will need the boundaries again.
        """
        build = self._build
        weights = build.load_weights(unit)
        if first:
            build.update_delayed(unit)
        build.prefetch_weights(unit + 1)
        for m in order:
            inputs = [self._boundary[unit - 1, m]] if unit else []
            output = self._boundary[unit, m] = build.take("boundary")
            index = build.emit(
                Kind.FORWARD,
                Resource.COMPUTE,
                unit=unit,
                micro_batch=m,
                reads=[weights, *inputs],
                writes=[output],
            )
            if self._spill and keep:
                self._used[unit - 1, m] = index
                self._leave(unit, m)
            if self._spill or not keep:
                for boundary in inputs:
                    build.release(boundary)
        build.drop_weights(unit)

    def head(self, order: Sequence[int], *, first: bool, last: bool) -> None:
        """Final norm, output projection, loss and their backward, one micro-batch at a time."""
        build = self._build
        unit = build.units - 1
        weights = [build.load_weights(unit)]
        if first:
            build.update_delayed(unit)
        gradients = [build.begin_gradient(unit, first=first)]
        if build.shape.tied:
            weights.append(build.load_weights(0))
            gradients.append(Buffer("tied_gradient", 0))
            if first:
                build.emit(Kind.ZERO_GRADIENT, Resource.CPU, unit=0, writes=gradients[1:])
        elif build.backward_loads(unit - 1):
            build.prefetch_weights(unit - 1)
        for m in order:
            boundary = self._boundary.pop((unit - 1, m))
            build.emit(
                Kind.HEAD,
                Resource.COMPUTE,
                unit=unit,
                micro_batch=m,
                reads=[*weights, boundary, *gradients],
                writes=[*gradients, Buffer("boundary_gradient", m)],
            )
            build.release(boundary)
        if build.shape.tied:
            build.drop_weights(0)
        build.end_gradient(unit, gradients[0], last=last)
        build.drop_weights(unit)

    def loss(self, order: Sequence[int]) -> None:
        """Final norm, output projection and loss, without backward."""
        build = self._build
        unit = build.units - 1
        weights = [build.load_weights(unit), *([build.load_weights(0)] if build.shape.tied else [])]
        for m in order:
            boundary = self._boundary.pop((unit - 1, m))
            build.emit(Kind.LOSS, Resource.COMPUTE, unit=unit, micro_batch=m, reads=[*weights, boundary])
            build.release(boundary)
        build.drop_weights(0)
        build.drop_weights(unit)

    def backward(self, unit: int, order: Sequence[int], *, first: bool, last: bool) -> None:
        """Recompute and backward of micro-batches; after the ``last`` ones, the unit's updates."""
        build = self._build
        weights = [build.load_weights(unit)] if build.shape.units[unit].backward_needs_weights else []
        gradient = build.begin_gradient(unit, first=first)
        if unit and build.backward_loads(unit - 1):
            build.prefetch_weights(unit - 1)
        for m in order:
            inputs = [self._arrive(unit - 1, m)] if unit else []
            build.emit(
                Kind.BACKWARD,
                Resource.COMPUTE,
                unit=unit,
                micro_batch=m,
                reads=[*weights, *inputs, gradient, Buffer("boundary_gradient", m)],
                writes=[gradient, *([Buffer("boundary_gradient", m)] if unit else [])],
            )
            for boundary in inputs:
                build.release(boundary)
            if not unit:
                build.release(Buffer("boundary_gradient", m))
        build.end_gradient(unit, gradient, last=last)
        build.drop_weights(unit)

    def _leave(self, unit: int, m: int) -> None:
        """Send a boundary to SSD."""
        build = self._build
        if unit == build.units - 2:
            return  # the head's input is used at once, and not again
        build.emit(
            Kind.STORE_BOUNDARY,
            Resource.SSD_WRITE,
            unit=unit,
            micro_batch=m,
            reads=[self._boundary[unit, m]],
            writes=[Buffer("ssd_boundary", unit * build.shape.micro_batches + m)],
            bytes=build.shape.boundary_bytes,
        )

    def _arrive(self, unit: int, m: int) -> Buffer:
        """A boundary that the backward needs, brought back from SSD where it was sent there."""
        build = self._build
        if not self._spill:
            return self._boundary.pop((unit, m))
        slot = build.take("boundary")
        home = Buffer("ssd_boundary", unit * build.shape.micro_batches + m)
        build.emit(
            Kind.LOAD_BOUNDARY,
            Resource.SSD_READ,
            unit=unit,
            micro_batch=m,
            reads=[home],
            writes=[slot],
            bytes=build.shape.boundary_bytes,
            also_after=[self._used[unit, m]],  # it is the same activation, emptied after that use
        )
        build.release(home)
        return slot
