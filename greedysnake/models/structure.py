"""Which parts of a transformers decoder are its embedding, its layers and its head.

The embedding is what the model's forward uses before its first decoder layer, the head whatever else
lies outside the layers. Both are found by running the model's own forward up to the first layer with
weights that take no memory, so no architecture needs to be known by name.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from greedysnake.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Parts of a model.

    Attributes:
        layers_name: where the list of decoder layers is.
        layers: the decoder layers, in order.
        embedding, head: names of the parameters outside the layers, a shared one under its first name.
        shared: names of the embedding's parameters that the head uses too.
        embedding_backward_needs_weights: whether the embedding's backward reads its weights.
    """

    layers_name: str
    layers: tuple[nn.Module, ...]
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    shared: tuple[str, ...]
    embedding_backward_needs_weights: bool

    @property
    def tied(self) -> bool:
        """Whether the head uses a parameter of the embedding too."""
        return bool(self.shared)


class _FirstLayerReached(BaseException):
    """Leaves the model's forward; no except clause of a model catches it."""


class _UsedTensors(TorchDispatchMode):
    """Remembers the storages that operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor):
                self.storages.add(value.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def refuse(model: PreTrainedModel, reason: str) -> ModelError:
    """The error for a model that cannot be run unit by unit."""
    return ModelError(
        f"models of type {model.config.model_type!r} cannot be trained layer by layer: {reason}. "
        f"Use a decoder that calls each of its layers once, in order"
    )


def find_layers(model: PreTrainedModel) -> tuple[str, tuple[nn.Module, ...]]:
    """The model's list of decoder layers and its name.

    Raises:
        ModelError: no list of modules has as many entries as the config says there are layers.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not count:
        raise refuse(model, f"its config has {count} layers (num_hidden_layers)")
    fitting = [(name, module) for name, module in lists if len(module) == count]
    if not fitting:
        sizes = ", ".join(f"{name} has {len(module)}" for name, module in lists) or "there is none"
        raise refuse(model, f"no list of modules has the config's {count} layers ({sizes})")
    name, layers = min(fitting, key=lambda entry: entry[0].count("."))
    return name, tuple(layers)


def inspect_structure(model: PreTrainedModel) -> Structure:
    """Find the parts of ``model``, whose parameters outside its layers may hold any value.

    Raises:
        ModelError: the model has no such parts.
    """
    layers_name, layers = find_layers(model)
    inside: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if inside.setdefault(id(parameter), index) != index:
                raise refuse(model, f"layers {inside[id(parameter)]} and {index} share a parameter")
    outside = {name: p for name, p in model.named_parameters() if id(p) not in inside}
    aliases: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)] = aliases.get(id(parameter), 0) + 1

    storages = {name: parameter.untyped_storage().data_ptr() for name, parameter in outside.items()}
    used, saved = _run_to_first_layer(model, layers[0])
    embedding = tuple(name for name in outside if storages[name] in used)
    if not embedding:
        raise refuse(model, "its forward reaches the first layer without using an embedding")
    return Structure(
        layers_name=layers_name,
        layers=layers,
        embedding=embedding,
        head=tuple(name for name in outside if name not in embedding),
        shared=tuple(name for name in embedding if aliases[id(outside[name])] > 1),
        embedding_backward_needs_weights=any(storages[name] in saved for name in embedding),
    )


def _run_to_first_layer(model: PreTrainedModel, first: nn.Module) -> tuple[set[int], set[int]]:
    """Storages used, and storages saved for backward, before the first decoder layer."""
    saved: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    def stop(*args: Any, **kwargs: Any) -> None:
        raise _FirstLayerReached

    used = _UsedTensors()
    first.forward = stop
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with torch.random.fork_rng(devices=[]), used, hooks:  # its dropout must not disturb the caller's numbers
            model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except _FirstLayerReached:
        return used.storages, saved
    except Exception as error:
        raise refuse(model, f"its forward fails before the first layer ({error})") from error
    finally:
        del first.forward
    raise refuse(model, "its forward ends without calling the first layer")


def takes_loss_arguments(model: PreTrainedModel) -> bool:
    """Whether the model's forward passes ``num_items_in_batch`` on to its loss."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind == inspect.Parameter.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters)
