"""Whether every trained parameter gets a gradient, as an optimizer would let one without decay, unnoticed."""

import re
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from greedysnake.errors import ModelError
from greedysnake.models.skeleton import Skeleton

_ONE_OF_MANY_EXPERTS = re.compile(r"experts?\.\d+\.")  # has none where the router sends it nothing, and that is right


def reached(roots: Iterable[Tensor]) -> Counter[int]:
    """Identities of the leaves that a backward from ``roots`` gives gradients, and how many of them each."""
    found: Counter[int] = Counter()
    seen = set()
    stack = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None and hasattr(following, "variable"):
                found[id(following.variable)] += 1
            else:
                stack.append(following)
    return found


class Reach:
    """Notes which parameters the first step's micro-batches reach, part by part.

    Args:
        skeleton: the model.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self._model_type = skeleton.model.config.model_type
        self._left: dict[int, dict[int, str]] = {}
        self._passes: dict[int, int] = {}
        for unit, layout in enumerate(skeleton.layouts):
            self._left[unit] = {
                id(skeleton.parameters[slot.name]): slot.name
                for slot in layout.parameters
                if slot.trainable and not _ONE_OF_MANY_EXPERTS.search(slot.name)
            }

    def note(self, unit: int, roots: Iterable[Tensor], *, micro_batches: int, last: bool = True) -> None:
        """A micro-batch is about to go back from ``roots`` through a unit.

        Args:
            unit: the unit.
            roots: where its backward starts.
            micro_batches: that go through the unit in the step.
            last: whether this is the last part of the unit's backward for this micro-batch.

        Raises:
            ModelError: all micro-batches of a step have gone through it, and parameters got nothing.
        """
        left = self._left.get(unit)
        if left is None:
            return
        for identity in reached(roots).keys() & left.keys():
            del left[identity]
        self._passes[unit] = self._passes.get(unit, 0) + last
        if self._passes[unit] < micro_batches:
            return
        del self._left[unit]
        if left:
            names = list(left.values())
            raise ModelError(
                f"models of type {self._model_type!r} cannot be trained as they are: {len(names)} parameters get no "
                f"gradient from text ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''}), and weight decay "
                f"alone would change them. Freeze them with training.freeze (in Python: Trainer(freeze=...)), or take "
                f"a model without them"
            )
