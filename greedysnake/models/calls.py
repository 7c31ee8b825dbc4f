"""One call of a decoder layer, recorded in the forward so that it can be run again in the backward.

Whatever carries a gradient into the layer (hidden state, state of other layers) is replaced by a leaf, and so
is whatever carries one out (hidden state, router logits, key/value state for later layers). The forward runs
without a graph, and the backward runs the layer again with a graph between the two; or the forward makes that
graph, which is kept.
"""

import weakref
from collections import UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from greedysnake.models.capture import active_lists, collecting


class UnsupportedCallError(Exception):
    """A layer is called in a way that cannot be run again; the message says how."""


def _is_mapping(value: Any) -> bool:
    """Mutable mappings are how some models pass state between layers; they are kept as they are."""
    return type(value) is dict or isinstance(value, UserDict)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


@dataclass
class _State:
    """A mapping argument: what the layer found in it, and the entries that it wrote, as leaves."""

    found: dict[Any, Any]
    wrote: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Made:
    """What the layer gave, with the graph that made it.

    Attributes:
        outputs: its floating-point outputs, the hidden state first.
        captured: the tensors it added to transformers' collector, by list.
        written: entries of its mapping arguments that it wrote, by the argument's name.
    """

    outputs: list[Tensor]
    captured: dict[str, list[Tensor]]
    written: dict[str, dict[Any, tuple[Tensor, ...]]]


@dataclass
class LayerCall:
    """One layer, one micro-batch.

    Attributes:
        values, spec: the call's flattened arguments; carriers of gradients are leaves.
        inputs: (tensor as the model passed it, leaf in its place) for each carrier.
        chained: positions of the previous layer's output, when this call is run again right behind it.
        outputs: leaves of the layer's floating-point outputs, the hidden state first.
        captured: leaves of the tensors it added to transformers' collector, by list.
        states: its mapping arguments, by name.
        output_gradient: gradient of the hidden state that came out, once known.
    """

    values: list[Any]
    spec: TreeSpec
    inputs: list[tuple[Tensor, Tensor]]
    chained: list[int]
    states: dict[str, _State]
    outputs: list[Tensor] = field(default_factory=list)
    captured: dict[str, list[Tensor]] = field(default_factory=dict)
    output_gradient: Tensor | None = None
    _hidden: weakref.ref[Tensor] | None = None
    _kept: _Made | None = None

    @classmethod
    def record(cls, args: tuple[Any, ...], kwargs: dict[str, Any], previous: "LayerCall | None") -> "LayerCall":
        """Take the arguments of a call; ``previous`` is the call before it in the same unit, if there is one."""
        states = {name: _State(dict(value)) for name, value in kwargs.items() if _is_mapping(value)}
        for name, state in states.items():
            for tensor in (t for t in tree_flatten(state.found)[0] if isinstance(t, Tensor)):
                if tensor.requires_grad and not tensor.is_leaf:
                    raise UnsupportedCallError(f"its argument {name!r} carries gradients in a mapping")
        values, spec = tree_flatten((args, kwargs), is_leaf=_is_mapping)
        carriers = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
        chained = []
        if previous is not None and not states and not previous.states:
            ours = [i for i in carriers if values[i] is previous.outputs[0]]
            others = any(values[i] is extra for i in carriers for extra in previous.outputs[1:])
            chained = [] if others else ours
        leaves: dict[int, tuple[Tensor, Tensor]] = {}
        for i in carriers:
            if i not in chained:
                original = values[i]
                leaves.setdefault(id(original), (original, original.detach().requires_grad_()))
                values[i] = leaves[id(original)][1]
        return cls(values=values, spec=spec, inputs=list(leaves.values()), chained=chained, states=states)

    def forward(self, layer: Callable[..., Any], *, keep: AbstractContextManager[Any] | None = None) -> Any:
        """Run the layer; gives its output with leaves in place of tensors.

        Args:
            layer: the layer's forward.
            keep: in which to make a graph that is kept for the backward; None: no graph is made.
        """
        args, kwargs = tree_unflatten(self.values, self.spec)
        lists = active_lists()
        lengths = {key: len(value) for key, value in lists.items()}
        with keep or nullcontext(), torch.set_grad_enabled(keep is not None):
            output = layer(*args, **kwargs)
        for i in self.chained:
            self.values[i] = None
        made = _Made(outputs=[], captured={}, written={})
        for key, value in lists.items():
            made.captured[key] = [t for t in value[lengths[key] :] if _is_differentiable(t)]
            value[lengths[key] :] = [_leaf(t) if _is_differentiable(t) else t for t in value[lengths[key] :]]
            self.captured[key] = [t for t in value[lengths[key] :] if _is_differentiable(t)]
        for name, state in self.states.items():
            made.written[name] = self._take_written(kwargs[name], state)
        flat, spec = tree_flatten(output)
        for i, value in enumerate(flat):
            if _is_differentiable(value):
                made.outputs.append(value)
                flat[i] = _leaf(value)
                self.outputs.append(flat[i])
        if not self.outputs:
            raise UnsupportedCallError("it returns no floating-point tensor")
        self._hidden = weakref.ref(self.outputs[0])
        self._kept = made if keep is not None else None
        return tree_unflatten(flat, spec)

    @staticmethod
    def _take_written(mapping: Any, state: _State) -> dict[Any, tuple[Tensor, ...]]:
        """Entries that the layer wrote for later layers become leaves; gives them as they were."""
        written = {}
        for key in list(mapping):
            value = mapping[key]
            if state.found.get(key) is value or not isinstance(value, tuple):
                continue
            if all(_is_differentiable(t) for t in value):
                written[key] = value
                mapping[key] = state.wrote[key] = tuple(_leaf(t) for t in value)
        return written

    def drop_graph(self) -> None:
        """Do not keep the forward's graph after all: the backward will run the layer again."""
        self._kept = None

    def forget_hidden(self) -> None:
        """Stop holding the hidden state that came out: the next call of the unit is chained to this one."""
        self.outputs[0] = torch.empty(0)

    def settle_output(self) -> None:
        """Keep the gradient of the hidden state that came out, and not the hidden state."""
        self.output_gradient = self.outputs[0].grad
        self.outputs[0] = torch.empty(0)

    def roots(self, layer: Callable[..., Any], hidden: Tensor | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """What the backward starts from: the kept graph, or that of another run of the layer.

        Args:
            layer: the layer's forward.
            hidden: output of the call that this one is chained to.

        Returns:
            The hidden state that comes out, and roots and gradients for the backward: every output that
            has received a gradient.
        """
        made, self._kept = self._kept or self._run_again(layer, hidden), None
        received = [(made.outputs[0], self._hidden_gradient())]
        received += [(t, leaf.grad) for t, leaf in zip(made.outputs[1:], self.outputs[1:], strict=True)]
        for key, leaves in self.captured.items():
            received += [(t, leaf.grad) for t, leaf in zip(made.captured[key], leaves, strict=True)]
        for name, state in self.states.items():
            for key, written in state.wrote.items():
                received += [(t, leaf.grad) for t, leaf in zip(made.written[name][key], written, strict=True)]
        pairs = [(t, gradient) for t, gradient in received if gradient is not None and t.requires_grad]
        return made.outputs[0], [t for t, _ in pairs], [gradient for _, gradient in pairs]

    def _run_again(self, layer: Callable[..., Any], hidden: Tensor | None) -> _Made:
        """Run the layer with a graph."""
        values = list(self.values)
        for i in self.chained:
            values[i] = hidden
        args, kwargs = tree_unflatten(values, self.spec)
        for name, state in self.states.items():
            kwargs[name] = type(kwargs[name])(state.found)
        with torch.enable_grad(), collecting(tuple(self.captured)) as lists:
            output = layer(*args, **kwargs)
        return _Made(
            outputs=[value for value in tree_flatten(output)[0] if _is_differentiable(value)],
            captured={key: [t for t in lists[key] if _is_differentiable(t)] for key in self.captured},
            written={name: {key: kwargs[name][key] for key in state.wrote} for name, state in self.states.items()},
        )

    def _hidden_gradient(self) -> Tensor | None:
        if self.output_gradient is not None:
            return self.output_gradient
        hidden = self._hidden() if self._hidden is not None else None
        return None if hidden is None else hidden.grad
