"""Learning rates by step: constant, linear or cosine, after a warm-up."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A learning-rate schedule.

    Attributes:
        peak: rate at the end of the warm-up.
        shape: what follows the warm-up.
        steps: of the whole run; the last one gets ``peak * min_ratio`` (linear and cosine), unless it is
            also the first, which gets the peak.
        warmup_steps: steps over which the rate rises linearly from ``peak / warmup_steps``.
        min_ratio: final rate as a share of the peak.
    """

    peak: float
    shape: Literal["constant", "linear", "cosine"] = "constant"
    steps: int = 1
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def at(self, step: int) -> float:
        """The rate of ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        falling_steps = self.steps - 1 - self.warmup_steps
        if falling_steps > 0:
            progress = min(1.0, (step - self.warmup_steps) / falling_steps)
        else:
            progress = 1.0 if step > 0 else 0.0
        falling = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * falling)
