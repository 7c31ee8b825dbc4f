"""Tensors that layers hand to the model's loss behind the call's back: router logits and the like.

transformers collects them with forward hooks that append to lists in a context variable. These are the
only functions that touch that variable.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers.utils.output_capturing import _active_collector  # the variable has no public name


def active_lists() -> dict[str, list[Tensor]]:
    """The lists that are being filled in this context, by what they hold; empty when none is."""
    return {key: value for key, value in (_active_collector.get() or {}).items() if isinstance(value, list)}


@contextmanager
def collecting(keys: tuple[str, ...]) -> Iterator[dict[str, list[Tensor]]]:
    """Let layers that run outside the model's forward fill fresh lists."""
    lists: dict[str, list[Tensor]] = {key: [] for key in keys}
    token = _active_collector.set(lists)
    try:
        yield lists
    finally:
        _active_collector.reset(token)
