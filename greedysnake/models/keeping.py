"""Which forwards leave their graphs for the backward, and that none takes more memory than was planned for it."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from greedysnake.models.saved_tensors import Meter, SavedTensors
from greedysnake.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A unit's forward whose graph is kept.

    Attributes:
        unit: the unit.
        weights: uint8, its weights.
        meter: counts what is saved.
    """

    unit: int
    weights: Tensor
    meter: Meter


class Keeper:
    """Keeps the graphs of units' forwards, as long as they are no larger than planned.

    A unit whose graph turns out larger is recomputed from then on: the next micro-batch's would be too large as well.

    Args:
        saved: saves the tensors.
        names: what a person calls each unit.
    """

    def __init__(self, saved: SavedTensors, names: Sequence[str]) -> None:
        self._saved = saved
        self._names = names
        self._most_bytes = 0
        self._too_large: set[int] = set()
        self._warned = False

    def begin(self, most_bytes: int) -> None:
        """A step begins in which a unit and micro-batch may keep up to ``most_bytes``."""
        if most_bytes != self._most_bytes:
            self._too_large.clear()
        self._most_bytes = most_bytes

    def start(self, unit: int, weights: Tensor) -> Kept | None:
        """A unit's forward begins whose graph is to be kept; None where it would be too large."""
        return None if unit in self._too_large else Kept(unit, weights, Meter())

    def saving(self, kept: Kept) -> AbstractContextManager[Any]:
        """In which a layer of the unit is to run."""
        return self._saved.saving(kept.unit, kept.weights, kept.meter)

    def fits(self, kept: Kept, micro_batch: int) -> bool:
        """Whether what a unit's forward saved may be kept; the first that may not is told of."""
        if kept.meter.bytes <= self._most_bytes:
            return True
        self._too_large.add(kept.unit)
        if not self._warned:
            logger.warning(
                "%s of micro-batch %d would keep %s of activations for the backward, more than the %s that were "
                "planned for it, so they are recomputed, as those of other layers are if they are larger than that",
                self._names[kept.unit],
                micro_batch,
                format_bytes(kept.meter.bytes),
                format_bytes(self._most_bytes),
            )
            self._warned = True
        return False
