"""Carries out a schedule: one method an operation kind, nothing decided here.

Operations run on one queue a resource, each as soon as what it waits for has ended. A method either does
its work before it returns, or gives the transfer that will have done it.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from greedysnake.engine.buffers import Buffers
from greedysnake.engine.devices import Device, bytes_of
from greedysnake.engine.endings import ContentEndings
from greedysnake.engine.heap import HeapRoom
from greedysnake.engine.queues import QueueRun
from greedysnake.engine.unit_store import (
    boundary_key,
    frozen_key,
    gradient_key,
    state_key,
    weight_places,
    weights_key,
)
from greedysnake.engine.work import NonFiniteStepError, StepWork
from greedysnake.models.layout import Chunk
from greedysnake.models.streaming import StreamedModel
from greedysnake.optim import ChunkUpdater, parameter_norms, total_norm
from greedysnake.report.events import OperationEvent
from greedysnake.schedule import Buffer, Choices, Kind, Operation, Resource, Schedule, Tier, one_by_one
from greedysnake.storage import BLOCK_BYTES, Store, Transfer, round_up


class Executor:
    """Runs schedules over one model, one store and one set of buffers.

    Args:
        model: runs the units.
        store: holds weights and state.
        buffers: memory for the schedules' pools.
        updater: the optimizer.
        choices: what the schedules were built with.
        device: where computation runs.
        heap: keeps what computation has freed from adding to what it needs; None: not here.
    """

    def __init__(
        self,
        *,
        model: StreamedModel,
        store: Store,
        buffers: Buffers,
        updater: ChunkUpdater,
        choices: Choices,
        device: Device,
        heap: HeapRoom | None = None,
    ) -> None:
        self._model = model
        self._skeleton = model.skeleton
        self._store = store
        self._buffers = buffers
        self._updater = updater
        self._choices = choices
        self._device = device
        self._heap = heap
        self._handlers: dict[Kind, Callable[[Operation, StepWork], Transfer | None]] = {
            Kind.LOAD_WEIGHTS: self._load_weights,
            Kind.COPY_WEIGHTS: self._copy_weights,
            Kind.FORWARD: self._forward,
            Kind.HEAD: self._head,
            Kind.LOSS: self._loss,
            Kind.BACKWARD: self._backward,
            Kind.COPY_BOUNDARY_OUT: self._copy_boundary_out,
            Kind.STORE_BOUNDARY: self._store_boundary,
            Kind.LOAD_BOUNDARY: self._load_boundary,
            Kind.COPY_BOUNDARY_IN: self._copy_boundary_in,
            Kind.ZERO_GRADIENT: self._zero_gradient,
            Kind.COPY_GRADIENT_IN: self._copy_gradient,
            Kind.COPY_GRADIENT_OUT: self._copy_gradient,
            Kind.ADD_TIED_GRADIENT: self._add_tied_gradient,
            Kind.GRADIENT_NORM: self._gradient_norm,
            Kind.TOTAL_NORM: self._total_norm,
            Kind.HOLD_GRADIENT: self._hold_gradient,
            Kind.LOAD_GRADIENT: self._load_gradient,
            Kind.LOAD_STATE: self._load_state,
            Kind.UPDATE: self._update,
            Kind.STORE_STATE: self._store_state,
            Kind.STORE_RESIDENT: self._store_state,
            Kind.COMMIT: self._commit,
        }

    def run(
        self, schedule: Schedule, work: StepWork, *, only: Collection[Resource] = tuple(Resource)
    ) -> list[OperationEvent]:
        """Carry out a schedule; gives when each operation began and ended (seconds of ``time.perf_counter``).

        Args:
            schedule: what to do.
            work: scalars and results of the step.
            only: resources whose operations are carried out; those of others end at once, for measurements.

        Raises:
            NonFiniteStepError: the loss or the gradient is not finite; everything before that in the schedule
                has been carried out.
            StorageError: a transfer failed.
            MemoryBudgetError: the device's memory did not suffice.
        """
        threads = torch.get_num_threads()

        def perform(operation: Operation) -> Transfer | None:
            if operation.resource not in only:
                return None
            if self._heap is not None and operation.resource == Resource.COMPUTE:
                self._heap.make(operation)
            return self._handlers[operation.kind](operation, work)

        run = QueueRun(
            schedule.operations if self._choices.overlap else _on_one_queue(schedule),
            perform,
            enter_thread=lambda: torch.set_num_threads(1),  # the cores are for the compute thread
            ending=ContentEndings(schedule, self._content_over).ended if Resource.COMPUTE in only else _nothing,
        )
        try:
            with self._device.computing():
                run.run()
        finally:
            torch.set_num_threads(threads)
        return [self._event(schedule.operations[index], start, end) for index, start, end in run.spans]

    def _event(self, operation: Operation, start: float, end: float) -> OperationEvent:
        updated = self._chunk(operation).pieces if operation.kind == Kind.UPDATE else ()
        return OperationEvent.of(operation, start, end, parameters=sum(piece.elements for piece in updated))

    def _content_over(self, buffer: Buffer, writer: Operation) -> None:
        """Nobody needs a buffer's content any more.

        A boundary that left is still held by the model's paused frames, so its storage is emptied, not its
        name dropped.
        """
        if buffer.pool == "activation":
            # one that was brought back goes with the backward's own graph, as the head's input does with the head's
            unit = _unit(writer)
            kept = self._model.training and unit >= self._skeleton.first_trained - 1
            leaves = kept and self._choices.boundary_leaves(unit, len(self._skeleton.layouts))
            if writer.kind == Kind.FORWARD and leaves:
                self._model.boundary(unit, _micro_batch(writer)).untyped_storage().resize_(0)
        elif buffer in self._buffers:
            self._device.freed(self._buffers[buffer])

    # Units

    def _load_weights(self, operation: Operation, work: StepWork) -> Transfer:
        unit, slot = _unit(operation), self._buffers[operation.writes[0]]
        return Transfer.together(
            self._store.read(key, chunk.weights(slot))
            for key, chunk in weight_places(unit, self._skeleton.layouts[unit])
        )

    def _copy_weights(self, operation: Operation, work: StepWork) -> None:
        size = self._skeleton.layouts[_unit(operation)].weight_bytes
        source, target = self._buffers[operation.reads[0]], self._buffers[operation.writes[0]]
        self._device.copy(target[:size], source[:size])

    def _forward(self, operation: Operation, work: StepWork) -> None:
        unit, weights = _unit(operation), self._weights(operation)[0]
        self._skeleton.attach(unit, weights)
        self._model.forward(unit, _micro_batch(operation), weights, keep=operation.keeps)
        self._skeleton.detach(unit)
        self._device.synchronize()

    def _head(self, operation: Operation, work: StepWork) -> None:
        gradients = [self._buffers[b].view(torch.float32) for b in operation.writes if b in self._buffers]
        loss = self._run_head(operation, gradients)
        work.losses[_micro_batch(operation)] = loss
        if work.must_be_finite and not loss.isfinite():
            raise NonFiniteStepError(f"the loss of micro-batch {operation.micro_batch} is {loss.item()}")

    def _loss(self, operation: Operation, work: StepWork) -> None:
        work.losses[_micro_batch(operation)] = self._run_head(operation, [])

    def _run_head(self, operation: Operation, gradients: list[Tensor]) -> Tensor:
        """The head, and the embedding where it is tied to it."""
        units = [_unit(operation), 0]
        weights = self._weights(operation)
        trained = [unit for unit in units[: len(weights)] if self._skeleton.layouts[unit].chunks]
        gradient_of = dict(zip(trained, gradients, strict=False))  # a loss alone has none
        for unit, memory in zip(units, weights, strict=False):
            self._skeleton.attach(unit, memory, gradient_of.get(unit))
        loss = self._model.head(_micro_batch(operation))
        for unit in units[: len(weights)]:
            self._skeleton.detach(unit)
        self._device.synchronize()
        return loss.cpu()

    def _backward(self, operation: Operation, work: StepWork) -> None:
        unit = _unit(operation)
        loaded = self._weights(operation)
        weights = loaded[0] if loaded else None  # an embedding's backward may not read them
        gradients = self._read(operation, "gradient", "device_gradient")  # none where all of the unit is frozen
        self._skeleton.attach(unit, weights, gradients[0].view(torch.float32) if gradients else None)
        self._model.backward(unit, _micro_batch(operation), weights)
        self._skeleton.detach(unit)
        self._device.synchronize()

    # Boundaries

    def _copy_boundary_out(self, operation: Operation, work: StepWork) -> None:
        boundary = bytes_of(self._model.boundary(_unit(operation), _micro_batch(operation)))
        self._device.copy(self._buffers[operation.writes[0]][: boundary.numel()], boundary)

    def _copy_boundary_in(self, operation: Operation, work: StepWork) -> None:
        tensor = self._model.boundary(_unit(operation), _micro_batch(operation))
        self._device.refill(tensor, self._buffers[operation.reads[0]][: tensor.nbytes])

    def _store_boundary(self, operation: Operation, work: StepWork) -> Transfer:
        buffer = self._buffers[operation.reads[0]][: self._boundary_bytes(operation)]
        return self._store.write(boundary_key(operation.writes[0].slot), [buffer])

    def _load_boundary(self, operation: Operation, work: StepWork) -> Transfer:
        buffer = self._buffers[operation.writes[0]][: self._boundary_bytes(operation)]
        return self._store.read(boundary_key(operation.reads[0].slot), buffer)

    def _boundary_bytes(self, operation: Operation) -> int:
        """Bytes of a boundary in whole blocks."""
        tensor = self._model.boundary(_unit(operation), _micro_batch(operation))
        return round_up(tensor.numel() * tensor.element_size(), BLOCK_BYTES)

    # Gradients

    def _zero_gradient(self, operation: Operation, work: StepWork) -> None:
        size = 4 * self._skeleton.layouts[_unit(operation)].gradient_elements
        self._buffers[operation.writes[0]][:size].zero_()
        self._device.synchronize()

    def _copy_gradient(self, operation: Operation, work: StepWork) -> None:
        size = 4 * self._skeleton.layouts[_unit(operation)].gradient_elements
        source, target = self._buffers[operation.reads[0]], self._buffers[operation.writes[0]]
        self._device.copy(target[:size], source[:size])

    def _add_tied_gradient(self, operation: Operation, work: StepWork) -> None:
        tied, gradient = (memory.view(torch.float32) for memory in self._read(operation, "tied_gradient", "gradient"))
        count = self._skeleton.layouts[0].gradient_elements
        gradient[:count].add_(tied[:count])

    def _gradient_norm(self, operation: Operation, work: StepWork) -> None:
        gradient = self._read(operation, "gradient")[0].view(torch.float32)
        slots = [slot for slot in self._skeleton.layouts[_unit(operation)].parameters if slot.trainable]
        norms = parameter_norms(slot.gradient(gradient) for slot in slots)
        work.norms.update(zip((slot.name for slot in slots), norms, strict=True))

    def _total_norm(self, operation: Operation, work: StepWork) -> None:
        norms = [work.norms[name] for name in self._skeleton.parameters if name in work.norms]
        work.gradient = total_norm(norms, work.max_grad_norm, work.prompt.loss_scale)
        if work.must_be_finite and not work.gradient.finite:
            raise NonFiniteStepError(f"the norm of the gradient is {work.gradient.norm}")
        work.prompt = replace(work.prompt, clip=work.gradient.clip)

    def _hold_gradient(self, operation: Operation, work: StepWork) -> Transfer | None:
        chunk = self._chunk(operation)
        source = chunk.gradient(self._buffers[operation.reads[0]].view(torch.float32)).view(torch.uint8)
        if self._choices.gradients == Tier.SSD:
            return self._store.write(gradient_key(_unit(operation), _index(operation)), [source])
        self._buffers[operation.writes[0]][: source.numel()].copy_(source)
        return None

    def _load_gradient(self, operation: Operation, work: StepWork) -> Transfer | None:
        chunk, target = self._chunk(operation), operation.writes[0]
        memory = self._buffers[target].view(torch.float32)
        into = (chunk.gradient(memory) if target.pool == "gradient" else memory[: chunk.elements]).view(torch.uint8)
        if self._choices.gradients == Tier.SSD:
            return self._store.read(gradient_key(_unit(operation), _index(operation)), into)
        into.copy_(self._buffers[operation.reads[0]][: into.numel()])
        return None

    # Optimizer

    def _load_state(self, operation: Operation, work: StepWork) -> Transfer:
        state = self._buffers[operation.writes[0]][: self._chunk(operation).state_bytes]
        return self._store.read(state_key(_unit(operation), _index(operation)), state)

    def _update(self, operation: Operation, work: StepWork) -> None:
        unit, index, chunk = _unit(operation), _index(operation), self._chunk(operation)
        source = operation.reads[0]
        memory = self._buffers[source].view(torch.float32)
        delayed = index >= self._choices.first_delayed(len(self._skeleton.layouts[unit].chunks))
        scalars = work.delayed if delayed else work.prompt
        if scalars is None:
            raise ValueError(f"{operation}: a delayed update without the scalars of its step")
        self._updater.update(
            chunk,
            chunk.weights(self._read(operation, "weights", "resident_weights")[0]),
            self._read(operation, "state", "resident_state")[0],
            chunk.gradient(memory) if source.pool == "gradient" else memory[: chunk.elements],
            scalars,
        )

    def _store_state(self, operation: Operation, work: StepWork) -> Transfer:
        unit, index, chunk = _unit(operation), _index(operation), self._chunk(operation)
        weights = [chunk.weights(memory) for memory in self._read(operation, "weights", "resident_weights")]
        state = [memory[: chunk.state_bytes] for memory in self._read(operation, "state", "resident_state")]
        writes = [self._store.write(weights_key(unit, index), [part]) for part in weights]
        return Transfer.together([*writes, *(self._store.write(state_key(unit, index), [part]) for part in state)])

    def _commit(self, operation: Operation, work: StepWork) -> None:
        self._store.commit(work.contents)
        work.committed = True

    # What stays in host memory

    def fill_residents(self) -> None:
        """Read what stays in host memory from the store."""
        for key, memory in (*self._residents(), *self._frozen_residents()):
            self._store.read(key, memory).wait()

    def store_residents(self) -> None:
        """Write what stays in host memory to the store, for a commit."""
        for key, memory in self._residents():
            self._store.write(key, [memory]).wait()

    def _residents(self) -> Iterator[tuple[str, Tensor]]:
        """Keys and memory of everything resident that changes."""
        number = 0
        for unit, layout in enumerate(self._skeleton.layouts):
            weights = Buffer("resident_weights", unit)
            for index, chunk in enumerate(layout.chunks):
                state = Buffer("resident_state", number)
                number += 1
                if weights in self._buffers:
                    yield weights_key(unit, index), chunk.weights(self._buffers[weights])
                if state in self._buffers:
                    yield state_key(unit, index), self._buffers[state][: chunk.state_bytes]

    def _frozen_residents(self) -> Iterator[tuple[str, Tensor]]:
        """Keys and memory of everything resident that never changes."""
        for unit, layout in enumerate(self._skeleton.layouts):
            weights = Buffer("resident_weights", unit)
            if weights in self._buffers:
                for index, chunk in enumerate(layout.frozen):
                    yield frozen_key(unit, index), chunk.weights(self._buffers[weights])

    # Helpers

    def _chunk(self, operation: Operation) -> Chunk:
        return self._skeleton.layouts[_unit(operation)].chunks[_index(operation)]

    def _weights(self, operation: Operation) -> list[Tensor]:
        """Weights where computation reads them: the operation's unit's, then a tied embedding's."""
        if self._choices.separate_device:
            return self._read(operation, "device_weights")
        pools = ("weights", "resident_weights")
        return [self._buffers[buffer] for buffer in operation.reads if buffer.pool in pools]

    def _read(self, operation: Operation, *pools: str) -> list[Tensor]:
        """Memory of the buffers that the operation reads from ``pools``, in that order."""
        found: list[Buffer] = [buffer for pool in pools for buffer in operation.reads if buffer.pool == pool]
        return [self._buffers[buffer] for buffer in found]


def _on_one_queue(schedule: Schedule) -> list[Operation]:
    """The same operations one by one, all in the calling thread: no other has anything to do meanwhile."""
    return [replace(operation, resource=Resource.COMPUTE) for operation in one_by_one(schedule).operations]


def _nothing(operation: Operation) -> None:
    """Without computation there are no activations to end."""


def _unit(operation: Operation) -> int:
    if operation.unit is None:
        raise ValueError(f"{operation} names no unit")
    return operation.unit


def _micro_batch(operation: Operation) -> int:
    if operation.micro_batch is None:
        raise ValueError(f"{operation} names no micro-batch")
    return operation.micro_batch


def _index(operation: Operation) -> int:
    if operation.chunk is None:
        raise ValueError(f"{operation} names no chunk")
    return operation.chunk
