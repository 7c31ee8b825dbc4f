"""Head and loss for a few positions at a time, so that the logits of a micro-batch never exist at once.

A transformers causal model calls its base model, which gives the hidden states, and then computes logits and
loss from them. Those lines of its own are run here once for each slice of the hidden states [B, T, hidden]
along T, with the labels of the same slice; the model shifts labels itself, so slices share one position: the
last of a slice has no label, and is the first of the next one. In training each slice goes backward at once.

Each position's loss comes from the same numbers as in one piece. What differs is the order of additions: of
the positions' losses, and of their gradients for the head's weights.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from greedysnake.models.gradient_sums import GradientSums
from greedysnake.models.skeleton import Skeleton

LossOf = Callable[[Tensor, Tensor], Tensor]
"""Gives the loss of hidden states [B, n, hidden] and labels int64 [B, n], by the model's own code."""

logger = logging.getLogger(__name__)

IGNORED = -100
_HIDDEN = "last_hidden_state"


class _HeadReached(BaseException):
    """Leaves the model's forward behind its base model; no except clause of a model catches it."""

    def __init__(self, output: ModelOutput) -> None:
        super().__init__()
        self.output = output


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """A loss whose backward has come down to the hidden states.

    Attributes:
        loss: scalar float32, without a graph.
        hidden: the base model's hidden states [B, T, hidden].
        gradient: of the scaled loss with respect to them; None without training.
    """

    loss: Tensor
    hidden: Tensor
    gradient: Tensor | None


class ChunkedHead:
    """Runs a model's forward such that its head and loss work on slices, where that is asked for and possible.

    The ``forward`` of the modules around the layers becomes an instance attribute. The one that the model calls,
    its base model or a part of it, is either run or gives what it gave before with other hidden states.
    Micro-batches may take turns inside it, each in a coroutine of its own.

    Args:
        skeleton: a causal language model.
        sums: of gradients.

    Attributes:
        chunk_tokens: tokens of a micro-batch whose logits exist at once; None: all.
    """

    def __init__(self, skeleton: Skeleton, sums: GradientSums) -> None:
        self._sums = sums
        self.chunk_tokens: int | None = None
        self._problem = head_problem(skeleton)
        self._checked = False
        self._given: ModelOutput | None = None  # what the base model gives without being run
        self._inside = ContextVar("inside", default=False)  # every coroutine has its own
        self._around = _modules_around(skeleton) if self._problem is None else []
        for module in self._around:
            module.forward = self._make_forward(module.forward)

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module in self._around:
            module.__dict__.pop("forward", None)
        self._around = []

    def run(
        self, batch: Mapping[str, Any], loss_of: Callable[[Mapping[str, Any]], Tensor], *, loss_scale: float | None
    ) -> Tensor | ChunkedLoss:
        """Loss of a micro-batch.

        Args:
            batch: with ``labels``, int64 [B, T].
            loss_of: the model's own forward and loss.
            loss_scale: factor of all gradients; None: no backward.

        Returns:
            The loss with its graph, or one that has gone backward already.
        """
        positions = self._positions(*batch["labels"].shape)
        try:
            loss = loss_of(batch)
        except _HeadReached as reached:
            output = reached.output
        else:
            if positions is not None and self._problem is None:
                self._give_up("it computes its loss without a module that gives hidden states")
            return loss
        hidden, labels = output[_HIDDEN], batch["labels"]

        def loss_of_part(part: Tensor, own_labels: Tensor) -> Tensor:
            self._given = replace(output, **{_HIDDEN: part})
            try:
                return loss_of({**batch, "labels": own_labels})
            finally:
                self._given = None

        positions = positions or hidden.shape[1]
        if not self._checked and not agrees(hidden, labels, positions, loss_of_part):
            self._give_up("its loss is not a sum over positions, each from its own hidden state")
            return loss_of_part(hidden, labels)
        self._checked = True
        return run_in_chunks(hidden, labels, positions, loss_of_part, sums=self._sums, loss_scale=loss_scale)

    def _positions(self, rows: int, length: int) -> int | None:
        """Positions of each row whose logits exist at once; None where that is all of them."""
        if self.chunk_tokens is None or self._problem is not None:
            return None
        positions = max(1, self.chunk_tokens // rows)
        return positions if positions < length - 1 else None  # the last one predicts nothing

    def _give_up(self, reason: str) -> None:
        self._problem = reason
        logger.warning(
            "The logits of a micro-batch are computed at once, whatever engine.head_chunk_tokens says, and may take "
            "more memory than planned: %s",
            reason,
        )

    def _make_forward(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._given is not None:
                return self._given
            if self._inside.get() or self.chunk_tokens is None or self._problem is not None:
                return own(*args, **kwargs)
            token = self._inside.set(True)
            try:
                output = own(*args, **kwargs)
            finally:
                self._inside.reset(token)
            if problem := output_problem(output):
                self._give_up(problem)
            elif self._positions(*output[_HIDDEN].shape[:2]) is not None:
                raise _HeadReached(output)
            return output

        return forward


def _modules_around(skeleton: Skeleton) -> list[nn.Module]:
    """The modules that hold the list of layers, without the model itself."""
    names = skeleton.structure.layers_name.split(".")[:-1]
    return [skeleton.model.get_submodule(".".join(names[: end + 1])) for end in range(len(names))]


def head_problem(skeleton: Skeleton) -> str | None:
    """Why a model's head cannot work on slices, as far as can be told without running it; None: it can."""
    if not _modules_around(skeleton):
        return "it computes its loss without a module that gives hidden states"
    if getattr(skeleton.model.config.get_text_config(), "output_router_logits", False):
        return "the loss of its router is added to its loss"
    return None


def output_problem(output: Any) -> str | None:
    """Why the base model's output cannot be cut into slices; None: it can."""
    if not isinstance(output, ModelOutput) or not isinstance(output.get(_HIDDEN), Tensor):
        return "it computes its loss without a module that gives hidden states by name"
    others = [key for key in output if key != _HIDDEN and any(isinstance(t, Tensor) for t in tree_leaves(output[key]))]
    return f"its loss may also depend on {', '.join(others)}" if others else None


def slices(length: int, positions: int) -> Iterator[slice]:
    """Slices of ``positions`` predicting positions each and one more, which together predict all but the first."""
    for start in range(0, max(length - 1, 1), positions):
        yield slice(start, min(start + positions + 1, length))


def run_in_chunks(
    hidden: Tensor, labels: Tensor, positions: int, loss_of: LossOf, *, sums: GradientSums, loss_scale: float | None
) -> ChunkedLoss:
    """Loss of a micro-batch, and in training its backward down to the hidden states.

    Args:
        hidden: [B, T, hidden].
        labels: int64 [B, T]; position t's hidden state predicts label t + 1; -100 does not count.
        positions: of each row, whose logits exist at once.
        loss_of: the model's head and loss.
        sums: of gradients.
        loss_scale: factor of all gradients; None: no backward.
    """
    whole = hidden.detach()
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    gradient = None if loss_scale is None else torch.zeros_like(whole)
    for part in slices(whole.shape[1], positions):
        own = labels[:, part]
        if bool((own[:, 1:] == IGNORED).all()):
            continue  # nothing to learn here: no loss and no gradient
        leaf = whole[:, part].detach().requires_grad_(gradient is not None)
        loss = loss_of(leaf, own)
        total += loss.detach().float()
        if gradient is not None and loss_scale is not None:
            sums.backward([loss.float() * loss_scale])
            if leaf.grad is not None:
                gradient[:, part] += leaf.grad
    return ChunkedLoss(loss=total, hidden=hidden, gradient=gradient)


def agrees(hidden: Tensor, labels: Tensor, positions: int, loss_of: LossOf) -> bool:
    """Whether a few positions have the same loss and gradient in one piece and in two, but for rounding.

    They have not where a position's logits depend on other positions' hidden states, or where the loss has a part
    that is not a sum over positions. Changes no gradients and no random numbers.
    """
    count = min(hidden.shape[1], max(3, min(9, positions + 1)))
    few, own = hidden.detach()[:, :count], labels[:, :count].clamp(min=0)
    tolerance = 1e-4 if hidden.dtype == torch.float32 else 2e-2
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        loss, gradient = _probe(few, own, count, loss_of)
        sliced_loss, sliced_gradient = _probe(few, own, max(1, (count - 1) // 2), loss_of)
    if not (loss.isfinite() and gradient.isfinite().all()):
        return True  # nothing to be seen from it; whoever looks at the loss will find out
    return bool(
        (loss - sliced_loss).abs() <= tolerance * loss.abs()
        and (gradient - sliced_gradient).abs().max() <= tolerance * gradient.abs().max()
    )


def _probe(hidden: Tensor, labels: Tensor, positions: int, loss_of: LossOf) -> tuple[Tensor, Tensor]:
    """Loss, and gradient of the hidden states alone, both float32."""
    total, gradient = torch.zeros((), device=hidden.device), torch.zeros(hidden.shape, device=hidden.device)
    for part in slices(hidden.shape[1], positions):
        leaf = hidden[:, part].detach().requires_grad_()
        loss = loss_of(leaf, labels[:, part])
        total += loss.detach().float()
        gradient[:, part] += torch.autograd.grad(loss.float(), leaf)[0].float()
    return total, gradient
