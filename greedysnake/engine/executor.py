"""Carries out a schedule: one method an operation kind, nothing decided here.

Operations run on one queue a resource, each as soon as what it waits for has ended. A method either does
its work before it returns, or gives the transfer that will have done it.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from greedysnake.engine.buffers import Buffers
from greedysnake.engine.queues import QueueRun, StepEndedError
from greedysnake.engine.unit_store import boundary_key, chunk_key, gradient_key
from greedysnake.models.layout import Chunk
from greedysnake.models.streaming import StreamedModel
from greedysnake.optim import ChunkUpdater, GradientNorm, UpdateScalars, parameter_norms, total_norm
from greedysnake.report.events import OperationEvent
from greedysnake.schedule import Buffer, Choices, Kind, Operation, Schedule, Tier
from greedysnake.storage import BLOCK_BYTES, Store, Transfer, aligned_empty, round_up


class NonFiniteStepError(StepEndedError):
    """The loss or the gradient of the step in flight is not finite."""


@dataclass
class StepWork:
    """What one run of a schedule is given and what it finds out.

    Attributes:
        prompt: scalars of this step's updates; their clip factor is known once the norm is.
        delayed: scalars of the updates that the step before left.
        max_grad_norm: largest gradient norm, None for no clipping.
        losses: loss of each micro-batch, its share of the step's.
        norms: norm of every parameter's gradient, by name.
        gradient: norm of the whole gradient.
    """

    prompt: UpdateScalars
    delayed: UpdateScalars | None = None
    max_grad_norm: float | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    gradient: GradientNorm | None = None


class Executor:
    """Runs schedules over one model, one store and one set of buffers.

    Args:
        model: runs the units.
        store: holds weights and state.
        buffers: memory for the schedules' pools.
        updater: the optimizer.
        choices: what the schedules were built with.
        boundary_bytes: of the largest boundary, where boundaries go to SSD.
    """

    def __init__(
        self,
        *,
        model: StreamedModel,
        store: Store,
        buffers: Buffers,
        updater: ChunkUpdater,
        choices: Choices,
        boundary_bytes: int,
    ) -> None:
        self._model = model
        self._skeleton = model.skeleton
        self._store = store
        self._buffers = buffers
        self._updater = updater
        self._choices = choices
        spilled = choices.boundaries == Tier.SSD
        staged = round_up(boundary_bytes, BLOCK_BYTES) if spilled else 0
        self._leaving, self._arriving = aligned_empty(staged), aligned_empty(staged)
        self._boundary_uses: Counter[tuple[int, int]] = Counter()
        self._boundary_lock = threading.Lock()
        self._handlers: dict[Kind, Callable[[Operation, StepWork], Transfer | None]] = {
            Kind.LOAD_WEIGHTS: self._load_weights,
            Kind.FORWARD: self._forward,
            Kind.HEAD: self._head,
            Kind.LOSS: self._loss,
            Kind.BACKWARD: self._backward,
            Kind.STORE_BOUNDARY: self._store_boundary,
            Kind.LOAD_BOUNDARY: self._load_boundary,
            Kind.ZERO_GRADIENT: self._zero_gradient,
            Kind.ADD_TIED_GRADIENT: self._add_tied_gradient,
            Kind.GRADIENT_NORM: self._gradient_norm,
            Kind.TOTAL_NORM: self._total_norm,
            Kind.HOLD_GRADIENT: self._hold_gradient,
            Kind.LOAD_GRADIENT: self._load_gradient,
            Kind.LOAD_STATE: self._load_state,
            Kind.UPDATE: self._update,
            Kind.STORE_STATE: self._store_state,
        }

    def run(self, schedule: Schedule, work: StepWork) -> list[OperationEvent]:
        """Carry out every operation; gives when each began and ended (seconds of ``time.perf_counter``).

        Raises:
            NonFiniteStepError: the loss or the gradient is not finite; everything before that in the schedule
                has been carried out.
            StorageError: a transfer failed.
        """
        self._boundary_uses.clear()
        threads = torch.get_num_threads()
        run = QueueRun(
            schedule.operations,
            lambda operation: self._handlers[operation.kind](operation, work),
            enter_thread=lambda: torch.set_num_threads(1),  # the cores are for the compute thread
        )
        try:
            run.run()
        finally:
            torch.set_num_threads(threads)
        return [_event(schedule.operations[index], start, end) for index, start, end in run.spans]

    # Units

    def _load_weights(self, operation: Operation, work: StepWork) -> Transfer:
        unit, slot = _unit(operation), self._buffers[operation.writes[0]]
        return Transfer.together(
            self._store.read(chunk_key(unit, index), chunk.weights(slot))
            for index, chunk in enumerate(self._skeleton.layouts[unit].chunks)
        )

    def _forward(self, operation: Operation, work: StepWork) -> None:
        unit, weights = _unit(operation), self._read(operation, "weights")[0]
        self._skeleton.attach(unit, weights)
        self._model.forward(unit, _micro_batch(operation), weights)
        self._skeleton.detach(unit)
        if unit and self._model.training and self._choices.boundaries == Tier.SSD:
            self._leave_boundary(unit - 1, _micro_batch(operation))

    def _head(self, operation: Operation, work: StepWork) -> None:
        gradients = [memory.view(torch.float32) for memory in self._read(operation, "gradient", "tied_gradient")]
        loss = self._run_head(operation, gradients)
        work.losses[_micro_batch(operation)] = loss
        if not loss.isfinite():
            raise NonFiniteStepError(f"the loss of micro-batch {operation.micro_batch} is {loss.item()}")

    def _loss(self, operation: Operation, work: StepWork) -> None:
        work.losses[_micro_batch(operation)] = self._run_head(operation, [])

    def _run_head(self, operation: Operation, gradients: list[Tensor]) -> Tensor:
        """The head, and the embedding where it is tied to it."""
        units = [_unit(operation), 0]
        weights = self._read(operation, "weights")
        for index, memory in enumerate(weights):
            self._skeleton.attach(units[index], memory, gradients[index] if gradients else None)
        loss = self._model.head(_micro_batch(operation))
        for unit in units[: len(weights)]:
            self._skeleton.detach(unit)
        return loss

    def _backward(self, operation: Operation, work: StepWork) -> None:
        unit = _unit(operation)
        loaded = self._read(operation, "weights")
        weights = loaded[0] if loaded else None  # an embedding's backward may not read them
        self._skeleton.attach(unit, weights, self._read(operation, "gradient")[0].view(torch.float32))
        self._model.backward(unit, _micro_batch(operation), weights)
        self._skeleton.detach(unit)

    # Boundaries

    def _store_boundary(self, operation: Operation, work: StepWork) -> None:
        unit, micro_batch = _unit(operation), _micro_batch(operation)
        boundary = _bytes_of(self._model.boundary(unit, micro_batch))
        staged = self._leaving[: round_up(boundary.numel(), BLOCK_BYTES)]
        staged[: boundary.numel()].copy_(boundary)
        self._store.write(boundary_key(unit, micro_batch), [staged]).wait()
        self._leave_boundary(unit, micro_batch)

    def _load_boundary(self, operation: Operation, work: StepWork) -> None:
        unit, micro_batch = _unit(operation), _micro_batch(operation)
        tensor = self._model.boundary(unit, micro_batch)
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        boundary = _bytes_of(tensor)
        staged = self._arriving[: round_up(boundary.numel(), BLOCK_BYTES)]
        self._store.read(boundary_key(unit, micro_batch), staged).wait()
        boundary.copy_(staged[: boundary.numel()])

    def _leave_boundary(self, unit: int, micro_batch: int) -> None:
        """Free a boundary that goes to SSD, once it is there and the next unit has used it.

        The model's paused frames hold the tensor, so its storage is emptied, not its name dropped.
        """
        with self._boundary_lock:
            self._boundary_uses[unit, micro_batch] += 1
            if self._boundary_uses[unit, micro_batch] == 2:
                self._model.boundary(unit, micro_batch).untyped_storage().resize_(0)

    # Gradients

    def _zero_gradient(self, operation: Operation, work: StepWork) -> None:
        size = 4 * self._skeleton.layouts[_unit(operation)].gradient_elements
        self._buffers[operation.writes[0]][:size].zero_()

    def _add_tied_gradient(self, operation: Operation, work: StepWork) -> None:
        tied, gradient = (memory.view(torch.float32) for memory in self._read(operation, "tied_gradient", "gradient"))
        count = self._skeleton.layouts[0].gradient_elements
        gradient[:count].add_(tied[:count])

    def _gradient_norm(self, operation: Operation, work: StepWork) -> None:
        gradient = self._read(operation, "gradient")[0].view(torch.float32)
        slots = self._skeleton.layouts[_unit(operation)].parameters
        norms = parameter_norms(slot.gradient(gradient) for slot in slots)
        work.norms.update(zip((slot.name for slot in slots), norms, strict=True))

    def _total_norm(self, operation: Operation, work: StepWork) -> None:
        norms = [work.norms[name] for name in self._skeleton.parameters if name in work.norms]
        work.gradient = total_norm(norms, work.max_grad_norm)
        if not work.gradient.finite:
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
        chunk, key = self._chunk(operation), chunk_key(_unit(operation), _index(operation))
        state = self._buffers[operation.writes[0]][: chunk.state_bytes]
        return self._store.read(key, state, chunk.weight_bytes)

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
            chunk.weights(self._read(operation, "weights")[0]),
            self._read(operation, "state")[0],
            chunk.gradient(memory) if source.pool == "gradient" else memory[: chunk.elements],
            scalars,
        )

    def _store_state(self, operation: Operation, work: StepWork) -> Transfer:
        chunk = self._chunk(operation)
        weights = chunk.weights(self._read(operation, "weights")[0])
        state = self._read(operation, "state")[0][: chunk.state_bytes]
        return self._store.write(chunk_key(_unit(operation), _index(operation)), [weights, state])

    # Helpers

    def _chunk(self, operation: Operation) -> Chunk:
        return self._skeleton.layouts[_unit(operation)].chunks[_index(operation)]

    def _read(self, operation: Operation, *pools: str) -> list[Tensor]:
        """Memory of the buffers that the operation reads from ``pools``, in that order."""
        found: list[Buffer] = [buffer for pool in pools for buffer in operation.reads if buffer.pool == pool]
        return [self._buffers[buffer] for buffer in found]


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


def _bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's memory as uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _event(operation: Operation, start: float, end: float) -> OperationEvent:
    return OperationEvent(
        kind=operation.kind,
        resource=operation.resource,
        unit=operation.unit,
        micro_batch=operation.micro_batch,
        chunk=operation.chunk,
        start_s=start,
        end_s=end,
        bytes=operation.bytes,
    )
