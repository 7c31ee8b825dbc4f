"""One micro-batch on its way through the model: the calls of its layers, and what their gradients become."""

from collections.abc import Iterable, Mapping

import torch
from greenlet import greenlet
from torch import Tensor
from torch.autograd.graph import Node

from greedysnake.models.calls import LayerCall, UnsupportedCallError
from greedysnake.models.gradient_sums import GradientSums


class Pass:
    """One micro-batch on its way through the model.

    Args:
        index: of the micro-batch.
        layers: how many layers the model has.
        coroutine: in which the model's forward runs.
    """

    def __init__(self, index: int, layers: int, coroutine: greenlet) -> None:
        self.index = index
        self.coroutine = coroutine
        self.calls: list[LayerCall | None] = [None] * layers
        self.next_layer = 0
        self._deferred: dict[int, tuple[Tensor, Tensor]] = {}  # gradients for the embedding, by tensor

    def call(self, index: int) -> LayerCall:
        """A layer's call, whose backward has not been yet."""
        call = self.calls[index]
        if call is None:
            raise ValueError(f"layer {index} of micro-batch {self.index} has no forward to go back through")
        return call

    def check_boundary(self, index: int) -> None:
        """Make sure that the storage of what a unit's first layer is given can be emptied and refilled.

        Raises:
            UnsupportedCallError: it cannot.
        """
        call, previous = self.call(index), self.calls[index - 1] if index else None
        boundary, problem = call.inputs[0][0], None
        if previous is not None and boundary is not previous.outputs[0]:
            problem = f"it changes the hidden state between layers before layer {index}"
        elif not boundary.is_contiguous() or boundary.untyped_storage().nbytes() != boundary.nbytes:
            problem = f"it gives layer {index} a hidden state that is a view of other memory"
        if problem:
            raise UnsupportedCallError(
                f"{problem}, so boundaries must stay in the memory that they are computed in "
                f"(engine.boundaries_on_device: 1 on a GPU, engine.boundaries_on_ssd: 0 on the CPU)"
            )

    def head_backward(
        self, root: Tensor, gradient: Tensor | None, embedding: Mapping[int, str], sums: GradientSums
    ) -> None:
        """Add the gradients of the head's parameters and of what the layers gave it.

        A head may also read what the embedding gave to layers. The embedding's own backward is not to run yet, so that
        gradient waits for it.

        Args:
            root: what the head computed: the loss, a scalar, or hidden states.
            gradient: of that; None: the loss's, which is 1.
            embedding: names of the embedding's parameters by their identities, without those that are the head's too.
            sums: of gradients.

        Raises:
            UnsupportedCallError: the two backwards cannot be told apart.
        """
        leaves, _ = _graph(root)
        ours = [leaf for leaf in leaves if id(leaf) not in embedding]
        if len(ours) == len(leaves):
            sums.backward([root], [gradient])
            return
        given = _by_node(tensor for call in self.calls if call for tensor, _ in call.inputs)
        beside, read = _graph(root, given)
        for leaf in beside:
            if id(leaf) in embedding:
                raise UnsupportedCallError(f"its head reads what {embedding[id(leaf)]} gives, and no layer does")
        if any(_graph(tensor, _by_node(read))[1] for tensor in read):
            raise UnsupportedCallError("its head reads what was computed between layers, and what that was made of")
        shares = torch.autograd.grad([root], read, None if gradient is None else [gradient], retain_graph=True)
        for tensor, share in zip(read, shares, strict=True):
            self._defer(tensor, share)
        sums.backward([root], [gradient], inputs=ours)

    def pass_on(self, index: int) -> None:
        """Hand the gradients of what a layer was given on to where it came from."""
        for original, leaf in self.call(index).inputs:
            if leaf.grad is None:
                continue
            if original.is_leaf:
                _add(original, leaf.grad)
                continue
            self._pass_to_layers(index, original, leaf.grad)
            self._defer(original, leaf.grad)

    def _pass_to_layers(self, index: int, original: Tensor, gradient: Tensor) -> None:
        """Go back through what the model computed between layers, to earlier layers' outputs."""
        earlier = [leaf for call in self.calls[:index] if call for leaf in call.outputs if leaf.requires_grad]
        if not earlier:
            return
        shares = torch.autograd.grad([original], earlier, [gradient], retain_graph=True, allow_unused=True)
        for leaf, share in zip(earlier, shares, strict=True):
            if share is not None:
                _add(leaf, share)

    def _defer(self, original: Tensor, gradient: Tensor) -> None:
        known = self._deferred.get(id(original))
        self._deferred[id(original)] = (original, gradient if known is None else known[1] + gradient)

    def deferred(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the embedding's backward starts from, and the gradients of that."""
        return [tensor for tensor, _ in self._deferred.values()], [gradient for _, gradient in self._deferred.values()]


def _add(leaf: Tensor, gradient: Tensor) -> None:
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _by_node(tensors: Iterable[Tensor]) -> dict[Node, Tensor]:
    return {tensor.grad_fn: tensor for tensor in tensors if tensor.grad_fn is not None}


def _graph(root: Tensor, stops: Mapping[Node, Tensor] | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """The leaves that a tensor was made of, and the tensors on the way there that the search was not to go beyond.

    Args:
        root: where to start, whether there is a stop or not.
        stops: tensors by what made them.
    """
    leaves, stopped, seen = [], [], set()
    stack = [following for following, _ in root.grad_fn.next_functions] if root.grad_fn is not None else []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if stops and node in stops:
            stopped.append(stops[node])
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return leaves, stopped
