"""The pieces that every schedule is put together from: weights that come and go, gradients, updates."""

from collections.abc import Iterable, Sequence

from greedysnake.schedule.operations import Buffer, Kind, Resource, Schedule, Tier
from greedysnake.schedule.pools import make_pools
from greedysnake.schedule.shape import Choices, StepShape
from greedysnake.schedule.tape import OperationTape


class ScheduleBuilder(OperationTape):
    """Collects the operations of one step over ``shape`` under ``choices``.

    Args:
        shape: sizes of the step.
        choices: what the plan decided.
        pending: whether the step before left delayed gradients, so that their updates come first.
        snapshot: whether the state after the step before is committed, once its delayed updates have been made.
    """

    def __init__(
        self,
        shape: StepShape,
        choices: Choices,
        *,
        pending: bool,
        snapshot: bool = False,
    ) -> None:
        super().__init__(make_pools(shape, choices))
        self.shape = shape
        self.choices = choices
        self.pending = pending
        self._snapshot = snapshot
        self.units = len(shape.units)
        self._first_chunk = [0]
        for unit in shape.units:
            self._first_chunk.append(self._first_chunk[-1] + len(unit.chunks))
        self._loaded: dict[int, Buffer] = {}
        self._copied: dict[int, Buffer] = {}  # weights on a separate device
        self._held: set[Buffer] = set()
        self._live_in = {
            *(Buffer(pool, slot) for pool in ("ssd_weights", "ssd_state") for slot in range(self._first_chunk[-1])),
            *(
                Buffer(pool, slot)
                for pool in ("resident_weights", "resident_state")
                for slot, size in enumerate(self.pools[pool].slot_bytes)
                if size
            ),
            *(Buffer("ssd_frozen", unit) for unit in range(self.units)),
        }
        if pending:
            self._held = {
                self.held(unit, chunk)
                for unit, sizes in enumerate(shape.units)
                for chunk in choices.delayed_chunks(sizes)
            }
            self._live_in |= self._held

    def chunk_id(self, unit: int, chunk: int) -> int:
        """Number of a unit's chunk among the chunks of all units."""
        return self._first_chunk[unit] + chunk

    def held(self, unit: int, chunk: int) -> Buffer:
        """Where a chunk's gradient waits for its update."""
        return Buffer("held", self.chunk_id(unit, chunk))

    def load_weights(self, unit: int) -> Buffer:
        """Bring a unit's weights into host memory, unless they are there already."""
        if unit in self._loaded:
            return self._loaded[unit]
        if self._is_resident(unit):
            self._loaded[unit] = Buffer("resident_weights", unit)
            return self._loaded[unit]
        slot = self._loaded[unit] = self.take("weights")
        sources = [Buffer("ssd_weights", self.chunk_id(unit, c)) for c in range(len(self.shape.units[unit].chunks))]
        self.emit(
            Kind.LOAD_WEIGHTS,
            Resource.SSD_READ,
            unit=unit,
            reads=[*sources, Buffer("ssd_frozen", unit)],
            writes=[slot],
            bytes=self.shape.units[unit].weight_bytes,
        )
        return slot

    def prefetch_weights(self, unit: int) -> None:
        """Load a unit's weights early where a slot is free."""
        if self.has_free("weights") or self._is_resident(unit):
            self.load_weights(unit)

    def _is_resident(self, unit: int) -> bool:
        return bool(self.pools["resident_weights"].slot_bytes[unit])

    def compute_weights(self, unit: int) -> Buffer:
        """A unit's weights where computation can read them."""
        weights = self.load_weights(unit)
        if not self.choices.separate_device:
            return weights
        slot = self._copied[unit] = self.take("device_weights")
        self.emit(
            Kind.COPY_WEIGHTS,
            Resource.H2D,
            unit=unit,
            reads=[weights],
            writes=[slot],
            bytes=self.shape.units[unit].weight_bytes,
        )
        return slot

    def drop_weights(self, unit: int) -> None:
        """Give back the slots that hold a unit's weights, if any do."""
        for slots in (self._loaded, self._copied):
            slot = slots.pop(unit, None)
            if slot is not None and slot.pool != "resident_weights":
                self.release(slot)

    def backward_loads(self, unit: int, *, last: bool) -> bool:
        """Whether a unit's weights are needed in a backward, by itself or by the updates after the ``last`` one."""
        sizes = self.shape.units[unit]
        updates = last and bool(self.choices.prompt_chunks(sizes)) and not self.choices.wait_for_norm
        return sizes.backward_needs_weights or updates

    def _update(
        self, unit: int, chunks: Iterable[int], *, gradient: Buffer | None, wait_for_norm: bool = False
    ) -> None:
        """AdamW on chunks of a unit whose weights are loaded.

        The gradient is taken from the slot ``gradient``, or from where it was held when that is None.
        """
        sizes = self.shape.units[unit].chunks
        on_ssd = self.choices.gradients == Tier.SSD
        for chunk in chunks:
            weights, state = self._loaded[unit].at_part(chunk), self._load_state(unit, chunk)
            source = gradient or self.held(unit, chunk)
            if gradient is None and on_ssd:
                source = self.take("gradient_chunk")
                self.emit(
                    Kind.LOAD_GRADIENT,
                    Resource.SSD_READ,
                    unit=unit,
                    chunk=chunk,
                    reads=[self.held(unit, chunk)],
                    writes=[source],
                    bytes=sizes[chunk].gradient_bytes,
                )
            norm = [Buffer("norm", self.units)] if wait_for_norm else []
            self.emit(
                Kind.UPDATE,
                Resource.CPU,
                unit=unit,
                chunk=chunk,
                reads=[source, state, weights, *norm],
                writes=[state, weights],
            )
            if gradient is None:
                self._drop_held(unit, chunk)
                if on_ssd:
                    self.release(source)
            self._store_state(unit, chunk, weights, state)

    def _load_state(self, unit: int, chunk: int) -> Buffer:
        """A chunk's state in host memory."""
        number = self.chunk_id(unit, chunk)
        if self.pools["resident_state"].slot_bytes[number]:
            return Buffer("resident_state", number)
        state = self.take("state")
        self.emit(
            Kind.LOAD_STATE,
            Resource.SSD_READ,
            unit=unit,
            chunk=chunk,
            reads=[Buffer("ssd_state", number)],
            writes=[state],
            bytes=self.shape.units[unit].chunks[chunk].state_bytes,
        )
        return state

    def _store_state(self, unit: int, chunk: int, weights: Buffer, state: Buffer) -> None:
        """Write a chunk's new weights and state back, as far as they do not stay in host memory."""
        number, sizes = self.chunk_id(unit, chunk), self.shape.units[unit].chunks[chunk]
        parts = []
        if weights.pool == "weights":
            parts.append((weights, Buffer("ssd_weights", number), sizes.weight_bytes))
        if state.pool == "state":
            parts.append((state, Buffer("ssd_state", number), sizes.state_bytes))
        self._store(Kind.STORE_STATE, unit, chunk, parts)
        if state.pool == "state":
            self.release(state)

    def _store(self, kind: Kind, unit: int, chunk: int, parts: Sequence[tuple[Buffer, Buffer, int]]) -> None:
        """Write parts of a chunk, each with its home on SSD and its bytes, if there are any."""
        if parts:
            self.emit(
                kind,
                Resource.SSD_WRITE,
                unit=unit,
                chunk=chunk,
                reads=[buffer for buffer, _, _ in parts],
                writes=[home for _, home, _ in parts],
                bytes=sum(size for _, _, size in parts),
            )

    def update_delayed(self, unit: int) -> None:
        """The α share of the step before, for a unit whose weights are loaded; then its part of a snapshot."""
        if self.pending:
            self._update(unit, self.choices.delayed_chunks(self.shape.units[unit]), gradient=None)
        if self._snapshot:
            for chunk in range(len(self.shape.units[unit].chunks)):
                self._store_resident(unit, chunk)

    def _store_resident(self, unit: int, chunk: int) -> None:
        """Write what of a chunk stays in host memory, so that the store is complete."""
        number, sizes = self.chunk_id(unit, chunk), self.shape.units[unit].chunks[chunk]
        parts = []
        if self._is_resident(unit):
            parts.append((Buffer("resident_weights", unit, chunk), Buffer("ssd_weights", number), sizes.weight_bytes))
        if self.pools["resident_state"].slot_bytes[number]:
            parts.append((Buffer("resident_state", number), Buffer("ssd_state", number), sizes.state_bytes))
        self._store(Kind.STORE_RESIDENT, unit, chunk, parts)

    def commit(self) -> None:
        """Commit the state after the step before, if that is due: every unit's part has been written.

        No update of this step has been made yet, and none is written before the commit, so a snapshot holds
        no delayed gradients and needs no copy.
        """
        if self._snapshot:
            everything = [
                Buffer(pool, slot) for pool in ("ssd_weights", "ssd_state") for slot in range(self._first_chunk[-1])
            ]
            self.emit(Kind.COMMIT, Resource.SSD_WRITE, reads=everything)

    def _drop_held(self, unit: int, chunk: int) -> None:
        self.release(self.held(unit, chunk))
        self._held.remove(self.held(unit, chunk))

    def _hold_gradient(self, unit: int, chunks: Iterable[int], gradient: Buffer) -> None:
        """Keep chunks of a unit's gradient where they wait for their update."""
        for chunk in chunks:
            target = self.held(unit, chunk)
            self._held.add(target)
            self.emit(
                Kind.HOLD_GRADIENT,
                Resource.SSD_WRITE if self.choices.gradients == Tier.SSD else Resource.CPU,
                unit=unit,
                chunk=chunk,
                reads=[gradient],
                writes=[target],
                bytes=self.shape.units[unit].chunks[chunk].gradient_bytes,
            )

    def begin_gradient(self, unit: int, *, first: bool) -> Buffer | None:
        """Memory that computation adds a unit's gradient to: zeros, or the sum over the micro-batches so far.

        None for a unit that has nothing to train.
        """
        if not self.shape.units[unit].chunks:
            return None
        if first:
            return self._zeros(unit)
        gradient = self.take("gradient")
        for chunk, sizes in enumerate(self.shape.units[unit].chunks):
            self.emit(
                Kind.LOAD_GRADIENT,
                Resource.SSD_READ if self.choices.gradients == Tier.SSD else Resource.CPU,
                unit=unit,
                chunk=chunk,
                reads=[self.held(unit, chunk), *([gradient] if chunk else [])],
                writes=[gradient],
                bytes=sizes.gradient_bytes,
            )
            self._drop_held(unit, chunk)
        if not self.choices.separate_device:
            return gradient
        copied = self._copy_in(unit, gradient)
        self.release(gradient)
        return copied

    def end_gradient(self, unit: int, gradient: Buffer | None, *, last: bool) -> None:
        """Give back a unit's gradient: complete after the ``last`` micro-batch, else kept as a partial sum."""
        if gradient is None:
            return
        if self.choices.separate_device:
            computed, gradient = gradient, self.take("gradient")
            self._copy_out(unit, computed, gradient)
        if last:
            self._finish_gradient(unit, gradient)
        else:
            self._hold_gradient(unit, range(len(self.shape.units[unit].chunks)), gradient)
        self.release(gradient)

    def begin_tied_gradient(self, *, first: bool) -> Buffer:
        """Memory that computation adds the head's part of a tied embedding's gradient to."""
        if self.choices.separate_device:
            return self._zeros(0) if first else self._copy_in(0, Buffer("tied_gradient", 0))
        tied = Buffer("tied_gradient", 0)
        if first:
            self.emit(Kind.ZERO_GRADIENT, Resource.COMPUTE, unit=0, writes=[tied])
        return tied

    def end_tied_gradient(self, gradient: Buffer, *, first: bool) -> None:
        """Keep the head's part of a tied embedding's gradient until the embedding's own is complete."""
        if self.choices.separate_device:
            self._copy_out(0, gradient, Buffer("tied_gradient", 0), in_place=not first)

    def _zeros(self, unit: int) -> Buffer:
        separate = self.choices.separate_device
        gradient = self.take("device_gradient" if separate else "gradient")
        self.emit(Kind.ZERO_GRADIENT, Resource.COMPUTE, unit=unit, writes=[gradient])
        return gradient

    def _copy_in(self, unit: int, gradient: Buffer) -> Buffer:
        slot = self.take("device_gradient")
        size = self.shape.units[unit].gradient_bytes
        self.emit(Kind.COPY_GRADIENT_IN, Resource.H2D, unit=unit, reads=[gradient], writes=[slot], bytes=size)
        return slot

    def _copy_out(self, unit: int, gradient: Buffer, target: Buffer, *, in_place: bool = False) -> None:
        self.emit(
            Kind.COPY_GRADIENT_OUT,
            Resource.D2H,
            unit=unit,
            reads=[gradient, *([target] if in_place else [])],
            writes=[target],
            bytes=self.shape.units[unit].gradient_bytes,
        )
        self.release(gradient)

    def _finish_gradient(self, unit: int, gradient: Buffer) -> None:
        """A unit's gradient is complete: its norm, then each chunk's update, now or later."""
        sizes = self.shape.units[unit]
        if unit == 0 and self.shape.tied_gradient:
            tied = Buffer("tied_gradient", 0)
            self.emit(Kind.ADD_TIED_GRADIENT, Resource.CPU, unit=0, reads=[tied, gradient], writes=[gradient])
            self.release(tied)
        norm = Buffer("norm", unit)
        self.emit(Kind.GRADIENT_NORM, Resource.CPU, unit=unit, reads=[gradient], writes=[norm])
        prompt, delayed = self.choices.prompt_chunks(sizes), self.choices.delayed_chunks(sizes)
        if self.choices.wait_for_norm:
            self._hold_gradient(unit, [*prompt, *delayed], gradient)
        else:
            self._hold_gradient(unit, delayed, gradient)
            if prompt:
                self.load_weights(unit)
                self._update(unit, prompt, gradient=gradient)

    def finish_step(self) -> None:
        """The norm of the whole gradient, then the updates that waited for it."""
        norms = [Buffer("norm", unit) for unit, sizes in enumerate(self.shape.units) if sizes.chunks]
        total = Buffer("norm", self.units)
        self.emit(Kind.TOTAL_NORM, Resource.CPU, reads=norms, writes=[total])
        for norm in norms:
            self.release(norm)
        if self.choices.wait_for_norm:
            for unit, sizes in enumerate(self.shape.units):
                if self.choices.prompt_chunks(sizes):
                    self.load_weights(unit)
                    self._update(unit, self.choices.prompt_chunks(sizes), gradient=None, wait_for_norm=True)
                    self.drop_weights(unit)
        self.release(total)

    def build(self, name: str) -> Schedule:
        """The finished schedule."""
        at_rest = {buffer for buffer in self._live_in if buffer.pool != "held"}
        return Schedule(
            name=name,
            operations=self.operations(),
            pools=self.pools,
            live_in=frozenset(self._live_in),
            live_out=frozenset(at_rest | self._held),
        )
