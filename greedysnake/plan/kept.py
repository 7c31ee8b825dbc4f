"""What a layer's backward needs of its forward: the bytes that autograd saves, found without computing anything.

The layer runs on tensors that have shapes and no memory (``FakeTensorMode``), so the answer is that of its own code.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public name for it
from torch.utils._pytree import tree_flatten, tree_unflatten

from greedysnake.models.saved_tensors import Meter, storage_key
from greedysnake.models.skeleton import Skeleton
from greedysnake.plan.activations import BatchShape, kept_bytes, layer_activation_bytes
from greedysnake.plan.model_sizes import activation_sizes

_FAKE_TENSORS = "torch._subclasses.fake_tensor"
"""The logger that gives a traceback of every operator that cannot be run so."""


def kept_unit_bytes(skeleton: Skeleton, batch: BatchShape) -> int:
    """Most bytes that a decoder unit's activations of one micro-batch take while they are kept for the backward."""
    layers = max(len(layers) for layers in skeleton.unit_layers)
    return kept_bytes(layer_saved_bytes(skeleton, batch.tokens), layers=layers, rows=batch.rows)


def layer_saved_bytes(skeleton: Skeleton, tokens: int) -> int:
    """Most bytes that a layer saves for one sequence; from shapes alone where the layer's code cannot tell."""
    saved = saved_layer_bytes(skeleton, tokens)
    return layer_activation_bytes(activation_sizes(skeleton), tokens) if saved is None else saved


class _SeenEnoughError(Exception):
    """Every kind of layer has been run."""


def saved_layer_bytes(skeleton: Skeleton, tokens: int) -> int | None:
    """Most bytes that any layer saves for the backward of one sequence of ``tokens``, weights left out.

    None where the model's code cannot be run in this way.
    """
    kinds: dict[int, tuple[object, ...]] = {}
    for unit, layers in enumerate(skeleton.unit_layers):
        shapes = tuple((slot.shape, slot.dtype, slot.trainable) for slot in skeleton.layouts[unit].parameters)
        kinds |= dict.fromkeys(layers, (len(layers), shapes))
    left, found = set(kinds.values()), [0]

    def run(index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not left:
            raise _SeenEnoughError
        left.discard(kinds[index])
        values, spec = tree_flatten((args, kwargs))
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
                values[i] = value.detach().requires_grad_()
                break
        args, kwargs = tree_unflatten(values, spec)
        meter = Meter()

        def pack(tensor: Tensor) -> Tensor:
            if storage_key(tensor) not in weights:
                meter.note(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
            output = forward(*args, **kwargs)
        found.append(meter.bytes)
        return output

    model = skeleton.model
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with _quiet(_FAKE_TENSORS), fake, _instead(skeleton.structure.layers, run):
            tensors = {
                slot.name: torch.empty(slot.shape, dtype=slot.dtype, device="cpu").requires_grad_(slot.trainable)
                for layout in skeleton.layouts
                for slot in layout.parameters
            }
            weights = {storage_key(tensor) for tensor in tensors.values()}
            for name, buffer in model.named_buffers():
                tensors[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            inputs = torch.zeros(1, tokens, dtype=torch.long, device="cpu")
            torch.func.functional_call(model, tensors, kwargs={"input_ids": inputs, "use_cache": False})
    except _SeenEnoughError:
        pass
    except Exception:  # whatever code a model has: it is an estimate
        return None
    return max(found) or None


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Say nothing of what fails: there is another way to tell."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _instead(layers: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Have ``run(index, forward, args, kwargs)`` called instead of each layer's forward."""
    layers = list(layers)
    before = [layer.__dict__.get("forward") for layer in layers]
    for index, layer in enumerate(layers):
        own = type(layer).forward.__get__(layer)
        layer.forward = lambda *args, index=index, own=own, **kwargs: run(index, own, args, kwargs)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
