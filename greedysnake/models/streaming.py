"""A transformers model run unit by unit, by pausing and resuming its own forward.

Each micro-batch's forward runs in a coroutine. Decoder layers' ``forward`` (an instance attribute: the
module stays itself) hands control back before a unit's first layer and once more before the head, so
that the caller decides which micro-batch goes through which unit when. The model's code between
layers, its masks, its head and its loss run as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from greedysnake.errors import ModelError
from greedysnake.models.calls import LayerCall, UnsupportedCallError
from greedysnake.models.gradient_sums import GradientSums
from greedysnake.models.head_chunks import ChunkedHead, ChunkedLoss
from greedysnake.models.initialize import mix_seed
from greedysnake.models.keeping import Keeper, Kept
from greedysnake.models.passing import Pass
from greedysnake.models.reach import Reach
from greedysnake.models.saved_tensors import SavedTensors
from greedysnake.models.skeleton import Skeleton
from greedysnake.models.structure import refuse, takes_loss_arguments

MicroBatch = Mapping[str, Any]
"""Tensors by name; some models take a mapping of attention masks by type of layer."""

HEAD = -1
_CPU = torch.device("cpu")


def layer_seed(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """Seed of the random numbers (dropout) that a layer draws for a micro-batch.

    The embedding has layer -1, the head the number of layers. Because the seed depends on nothing else,
    the numbers are the same under every schedule, and again when the layer is recomputed.
    """
    return mix_seed(seed, step, micro_batch, layer + 1)


class StreamedModel:
    """Runs the units of a skeleton, one micro-batch at a time, in any order that a schedule asks for.

    The caller attaches a unit's weights before it calls :meth:`forward`, :meth:`head` or
    :meth:`backward` for it. All calls come from one thread.

    Args:
        skeleton: the model cut into units.
        seed: of all random numbers drawn in training.
        device: where inputs and the model's buffers are.
    """

    def __init__(self, skeleton: Skeleton, seed: int, device: torch.device = _CPU) -> None:
        self.skeleton = skeleton
        self._device = device
        for module in skeleton.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self._seed = seed
        self._step = 0
        self._layers = skeleton.structure.layers
        self._forwards = [layer.forward for layer in self._layers]
        self._first = {layers[0] for layers in skeleton.unit_layers if layers}
        self._first_trained = skeleton.first_trained
        before = skeleton.unit_layers[1 : max(1, self._first_trained)]
        self._first_kept = sum(len(layers) for layers in before)  # calls of earlier layers are not run again
        self._passes: dict[int, Pass] = {}
        self._micro_batches: Sequence[MicroBatch] = ()
        self._target_tokens = 1
        self._loss_scale = 1.0
        self._training = True
        self._running: Pass | None = None
        self._inference: Callable[[], Tensor] | None = None
        self._spilled = False
        self._saved = SavedTensors()
        self._keeper = Keeper(self._saved, skeleton.unit_names)
        self._kept: Kept | None = None  # of the unit's forward that runs
        alone = [slot.name for slot in skeleton.layouts[0].parameters if slot.name not in skeleton.structure.shared]
        self._embedding_alone = {id(skeleton.parameters[name]): name for name in alone}
        self._reach = Reach(skeleton)
        self._native_loss = takes_loss_arguments(skeleton.model)
        self._sums = GradientSums(skeleton.parameters.values())
        self._head = ChunkedHead(skeleton, self._sums)
        for index, layer in enumerate(self._layers):
            layer.forward = self._make_forward(index)

    @property
    def training(self) -> bool:
        """Whether the micro-batches in flight will go backward."""
        return self._training

    # What the executor calls

    def begin(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        target_tokens: int,
        training: bool = True,
        boundaries_leave: bool = False,
        kept_bytes: int = 0,
        loss_scale: float = 1.0,
        head_chunk_tokens: int | None = None,
    ) -> None:
        """Take a step's micro-batches.

        Args:
            micro_batches: ``input_ids`` int64 [B, T], ``labels`` int64 [B, T], optionally more model inputs.
            step: number of the step, for the random numbers.
            target_tokens: labels of the whole step that count; the loss is a sum divided by it.
            training: whether a backward follows; else nothing is kept and dropout is off.
            boundaries_leave: whether boundaries will be emptied and refilled between forward and backward.
            kept_bytes: most memory for the activations of a unit and micro-batch that are kept for the backward.
            loss_scale: factor that all gradients carry.
            head_chunk_tokens: tokens of a micro-batch whose logits exist at once; None: all.
        """
        self.abandon()
        self._inference = None
        self._micro_batches = [
            {name: self.on_device(value) for name, value in batch.items() if value is not None}
            for batch in micro_batches
        ]
        self._step = step
        self._target_tokens = target_tokens
        self._loss_scale = loss_scale
        self._training = training
        self._spilled = boundaries_leave
        self._keeper.begin(kept_bytes)
        self._head.chunk_tokens = head_chunk_tokens
        self.skeleton.model.train(training)

    def place_parameters(self) -> None:
        """Have parameters that have no storage between steps lie where computation is: transformers looks at that."""
        for parameter in self.skeleton.parameters.values():
            if parameter.device != self._device:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def begin_inference(self, call: Callable[[], Tensor]) -> None:
        """Take one run of the model's own forward instead of micro-batches, as micro-batch 0.

        Args:
            call: runs it, with whatever arguments, in a coroutine; gives what :meth:`head` is to give.
        """
        self.abandon()
        self._inference = call
        self._head.chunk_tokens = None
        self._training = False
        self.skeleton.model.eval()

    def forward(self, unit: int, micro_batch: int, weights: Tensor, *, keep: bool = False) -> None:
        """Bring a micro-batch through the embedding (unit 0) or a decoder unit; ``weights`` are attached.

        Args:
            unit, micro_batch: what goes through what.
            weights: uint8, of the unit.
            keep: whether activations are kept for the backward, within the bytes that :meth:`begin` was told; else
                the backward recomputes them.
        """
        self._kept = kept = self._keeper.start(unit, weights) if keep else None
        with self._remembering_weights(weights) if unit == 0 else nullcontext(), self._carrying_gradients(unit):
            if unit == 0:
                self._start(micro_batch)
            reached = self._resume(micro_batch)
        self._kept = None
        if kept is not None and not self._keeper.fits(kept, micro_batch):
            for index in self.skeleton.unit_layers[unit]:
                self._passes[micro_batch].call(index).drop_graph()
        following = self.skeleton.unit_layers[unit + 1]
        if reached != (following[0] if following else HEAD):
            raise self._refusal(f"its forward went from unit {unit} to layer {reached}")

    def head(self, micro_batch: int) -> Tensor:
        """Final norm, logits and loss of a micro-batch, and their backward in training.

        Returns:
            The micro-batch's share of the step's loss, a scalar, without the loss scale.
        """
        reached = self._resume(micro_batch)
        loss = reached.loss if isinstance(reached, ChunkedLoss) else reached
        if not isinstance(loss, Tensor):
            raise self._refusal(f"its forward called layer {loss} again after the last one")
        if self._training:
            work = self._passes[micro_batch]
            if isinstance(reached, ChunkedLoss):
                self._head_backward(work, reached.hidden, reached.gradient)
            else:
                self._reach.note(len(self.skeleton.layouts) - 1, [loss], micro_batches=len(self._micro_batches))
                self._head_backward(work, loss.float() * self._loss_scale, None)
            last = work.calls[-1]
            if last is not None:
                last.settle_output()
        if not self._training or self._first_trained == len(self.skeleton.layouts) - 1:
            del self._passes[micro_batch]
        return loss.detach()

    def backward(self, unit: int, micro_batch: int, weights: Tensor | None) -> None:
        """Recompute a unit, where nothing was kept, and add its gradients.

        Args:
            unit, micro_batch: what goes back through what.
            weights: uint8, of the unit, attached; None: not needed by the embedding.
        """
        work = self._passes[micro_batch]
        if unit == 0:
            self._backward_embedding(work, weights)
            return
        segment: list[int] = []
        with self._saved.given(unit, weights):
            for index in reversed(self.skeleton.unit_layers[unit]):
                segment.insert(0, index)
                if not work.call(index).chained:
                    self._backward_segment(work, segment, unit)
                    segment = []
        if unit == self._first_trained:
            del self._passes[micro_batch]

    def boundary(self, unit: int, micro_batch: int) -> Tensor:
        """The activation that left ``unit`` for the next one; its storage may be emptied and refilled."""
        following = self.skeleton.unit_layers[unit + 1]
        call = self._passes[micro_batch].calls[following[0] if following else -1]
        if call is None:
            raise ValueError(f"micro-batch {micro_batch} has not left unit {unit}")
        return call.inputs[0][1] if following else call.outputs[0]

    def abandon(self) -> None:
        """Drop whatever is in flight."""
        for work in self._passes.values():
            if work.coroutine:
                work.coroutine.throw(GreenletExit)
        self._passes = {}

    def close(self) -> None:
        """Drop whatever is in flight and give the layers their own forward back."""
        self.abandon()
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        self._head.close()
        self._sums.close()

    def on_device(self, value: Any) -> Any:
        """A tensor, or a mapping of them, where computation is."""
        if isinstance(value, Mapping):
            return {name: inner.to(self._device) for name, inner in value.items()}
        return value.to(self._device)

    # Forward

    def _start(self, micro_batch: int) -> None:
        coroutine = greenlet(lambda: self._run_model(micro_batch))
        self._passes[micro_batch] = Pass(micro_batch, len(self._layers), coroutine)

    def _run_model(self, micro_batch: int) -> Tensor | ChunkedLoss:
        """The model's own forward; runs in a coroutine."""
        if self._inference is not None:
            return self._inference()
        self._set_seed(micro_batch, -1)
        scale = self._loss_scale if self._training else None
        return self._head.run(self._micro_batches[micro_batch], self._loss_of, loss_scale=scale)

    def _loss_of(self, micro_batch: MicroBatch) -> Tensor:
        """Loss of a micro-batch by the model's own forward, its share of the step's."""
        model, batch = self.skeleton.model, dict(micro_batch)
        if self._native_loss:
            count = torch.tensor(self._target_tokens, device=self._device)
            return model(**batch, use_cache=False, num_items_in_batch=count).loss
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits
        return model.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=self._target_tokens)

    def _resume(self, micro_batch: int) -> Any:
        """Let a micro-batch go on until it pauses (gives the layer it waits for) or ends (gives the loss)."""
        self._running = work = self._passes[micro_batch]
        work.coroutine.parent = getcurrent()
        try:
            return work.coroutine.switch()
        except UnsupportedCallError as error:
            raise self._refusal(str(error)) from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it used weights of a unit that is not in memory, say
            raise self._refusal(f"its forward fails when it is run unit by unit ({error})") from error

    def _make_forward(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run_layer(index, args, kwargs)

        return forward

    def _run_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a decoder layer's forward does; runs in a micro-batch's coroutine."""
        work = self._running
        if work is None:
            raise UnsupportedCallError(f"layer {index} is called outside a step")
        if index != work.next_layer:
            raise UnsupportedCallError(f"layer {index} is called where layer {work.next_layer} is due")
        work.next_layer += 1
        if not self._training:
            if index in self._first:
                work.coroutine.parent.switch(index)
            output = self._forwards[index](*args, **kwargs)
            if index == len(self._layers) - 1:
                work.coroutine.parent.switch(HEAD)
            return output

        if not torch.is_grad_enabled():
            raise UnsupportedCallError(f"layer {index} is called without gradients")
        previous = work.calls[index - 1] if index else None
        alone = index in self._first or self._kept is not None  # layers whose graphs are kept go back one by one
        call = work.calls[index] = LayerCall.record(args, kwargs, None if alone else previous)
        if not call.inputs and not call.chained:
            raise UnsupportedCallError(f"layer {index} is given nothing that carries a gradient")
        if self._spilled and not call.chained:
            work.check_boundary(index)
        if 0 < index <= self._first_kept:
            work.calls[index - 1] = None
        if index in self._first:
            work.coroutine.parent.switch(index)
        self._set_seed(work.index, index)
        kept = self._kept  # of this unit's forward: there may have been others while this one waited
        output = call.forward(self._forwards[index], keep=None if kept is None else self._keeper.saving(kept))
        if call.chained and previous is not None:
            previous.forget_hidden()
        if index == len(self._layers) - 1:
            work.coroutine.parent.switch(HEAD)
            self._set_seed(work.index, index + 1)
        return output

    def _set_seed(self, micro_batch: int, layer: int) -> None:
        seed = layer_seed(self._seed, self._step, micro_batch, layer)
        torch.default_generator.manual_seed(seed)  # as torch.manual_seed, without a look at every device
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    # Backward

    def _head_backward(self, work: Pass, root: Tensor, gradient: Tensor | None) -> None:
        try:
            work.head_backward(root, gradient, self._embedding_alone, self._sums)
        except UnsupportedCallError as error:
            raise self._refusal(str(error)) from error

    def _backward_segment(self, work: Pass, layers: list[int], unit: int) -> None:
        """Recompute layers of a unit that follow on each other directly, if need be; go back through them at once."""
        hidden: Tensor | None = None
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for index in layers:
            self._set_seed(work.index, index)
            hidden, more_roots, more_gradients = work.call(index).roots(self._forwards[index], hidden)
            roots += more_roots
            gradients += more_gradients
        last = layers[0] == self.skeleton.unit_layers[unit][0]
        self._reach.note(unit, roots, micro_batches=len(self._micro_batches), last=last)
        self._sums.backward(roots, gradients)
        for index in layers:
            work.pass_on(index)
            work.calls[index] = None
        before = work.calls[layers[0] - 1] if layers[0] else None
        if before is not None:
            before.settle_output()

    def _backward_embedding(self, work: Pass, weights: Tensor | None) -> None:
        trained = [slot.name for slot in self.skeleton.layouts[0].parameters if slot.trainable]
        roots, gradients = work.deferred()
        self._reach.note(0, roots, micro_batches=len(self._micro_batches))
        with self._saved.given(0, weights):
            self._sums.backward(roots, gradients, inputs=[self.skeleton.parameters[name] for name in trained])
        del self._passes[work.index]

    @contextmanager
    def _carrying_gradients(self, unit: int) -> Iterator[None]:
        """Let what a frozen embedding gives carry gradients, so that it is told apart from masks and positions.

        Its own backward never runs.
        """
        frozen = []
        if unit == 0 and self._training and self._first_trained:
            frozen = [self.skeleton.parameters[slot.name] for slot in self.skeleton.layouts[0].parameters]
            frozen = [parameter for parameter in frozen if parameter.is_floating_point()]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _remembering_weights(self, weights: Tensor) -> AbstractContextManager[Any]:
        """In the embedding's forward, save places in the weights instead of views of a buffer that will be reused."""
        if not self._training or not self.skeleton.structure.embedding_backward_needs_weights:
            return nullcontext()
        return self._saved.saving(0, weights)

    def _refusal(self, reason: str) -> ModelError:
        return refuse(self.skeleton.model, reason)
