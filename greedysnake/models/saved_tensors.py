"""What autograd saves of a unit whose weights will have left memory, and lie elsewhere, when its backward runs.

A graph that is kept from the forward to the backward must not hold views of the buffer that the weights were in: that
buffer is used again. Their places are saved instead, and looked up in the weights that the backward is given.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


class SavedTensors:
    """Saves tensors for backwards that come later, of any unit; their weights are given when they come."""

    def __init__(self) -> None:
        self._given: tuple[int, Tensor | None] | None = None

    def saving(self, unit: int, weights: Tensor, meter: "Meter | None" = None) -> AbstractContextManager[Any]:
        """While a graph is made: views of the unit's ``weights`` (uint8) are saved as places.

        Args:
            unit: the unit.
            weights: uint8, its weights.
            meter: told of all else that is saved.
        """
        start, end = weights.data_ptr(), weights.data_ptr() + weights.numel()

        def pack(tensor: Tensor) -> Any:
            if not start <= tensor.data_ptr() < end:
                if meter is not None:
                    meter.note(tensor)
                return tensor.detach()  # the tensor itself would hold its own graph, and never be freed
            offset = (tensor.data_ptr() - start) // tensor.element_size()
            return unit, tensor.dtype, tensor.size(), tensor.stride(), offset

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    @contextmanager
    def given(self, unit: int, weights: Tensor | None) -> Iterator[None]:
        """While a unit's backward runs: its weights, uint8."""
        self._given = unit, weights
        try:
            yield
        finally:
            self._given = None

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit, dtype, size, stride, offset = packed
        if self._given is None or self._given[0] != unit or self._given[1] is None:
            raise ValueError(f"a backward needs weights of unit {unit}, which are not in memory")
        weights = self._given[1].view(dtype)
        return weights.as_strided(size, stride, weights.storage_offset() + offset)


class Meter:
    """Adds up the memory of saved tensors, whatever views of it there are."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        """Count a tensor that is saved."""
        key = storage_key(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self.bytes += tensor.untyped_storage().nbytes()


def storage_key(tensor: Tensor) -> int:
    """The same for all views of a memory; tensors without memory (``FakeTensorMode``) have one too, and no address."""
    return int(tensor.untyped_storage()._cdata)
