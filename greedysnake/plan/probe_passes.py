"""How often the probe passes through a layer, so that it ends in time whatever the model."""

from dataclasses import dataclass
from math import ceil

_BESIDE = 1.5
"""Times as long as alone that a pass is taken to last beside other work."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What is measured of a layer.

    Attributes:
        micro_batches: that pass the layer one after another, as in a step: the second finds the weights in the caches.
        rounds: of the layer beside other work, each in turns with the layer alone; 0: it is not measured so.
        warm_up: whether all passes are made once before they count, as the first are slower.
    """

    micro_batches: int = 4
    rounds: int = 3
    warm_up: bool = True

    @property
    def kept(self) -> tuple[bool, ...]:
        """For each pass, whether the layer's activations stay; of such passes the first micro-batch does not count."""
        return (False, True) if self.micro_batches > 1 else (False,)


EVERY = Passes()
"""What is measured where there is time."""
LEAST_BESIDE = Passes(micro_batches=1, rounds=1, warm_up=False)
"""What is measured of a small layer, where a model's own takes too long to be measured beside other work."""
FEWER = tuple(
    Passes(micro_batches=micro_batches, rounds=rounds, warm_up=False)
    for micro_batches, rounds in ((4, 1), (2, 1), (1, 1), (1, 0))
)
"""What is measured where there is not, the most first."""


def passes_within(left: float, micro_batch: float, *, seconds: float, shares_cores: bool) -> Passes:
    """The most that can be measured in the time that is left, and the least where not even that fits.

    Args:
        left: seconds.
        micro_batch: seconds of one, forward and backward through embedding, layer and head.
        seconds: to measure for at least, each rate; twice that for the layer itself.
        shares_cores: whether the layer is measured beside other work too.
    """
    for passes in (EVERY, *FEWER):
        if expected_seconds(passes, micro_batch, seconds=seconds, shares_cores=shares_cores) <= left:
            return passes
    return FEWER[-1]


def expected_seconds(passes: Passes, micro_batch: float, *, seconds: float, shares_cores: bool) -> float:
    """Seconds that some passes take (arguments as of :func:`passes_within`)."""
    once = len(passes.kept) * passes.micro_batches * micro_batch
    found = _repeated(once, 2 * seconds) + (once if passes.warm_up else 0.0)
    if shares_cores and passes.rounds:
        alone, each = passes.micro_batches * micro_batch, seconds / passes.rounds
        # beside the optimizer, and beside the disks
        found += 2 * passes.rounds * (_repeated(alone, each) + _repeated(_BESIDE * alone, each))
    elif shares_cores:
        found += 4 * seconds  # a small layer is measured so instead
    return found


def _repeated(once: float, least: float) -> float:
    """Seconds of what is done over and over, once at least, till ``least`` seconds are over."""
    return once * max(1, ceil(least / once)) if once else least
