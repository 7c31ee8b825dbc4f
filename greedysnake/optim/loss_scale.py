"""Dynamic loss scaling for float16, with the rules of ``torch.amp.GradScaler``.

float16 has no number between zero and 6e-8, and many gradients lie there. So the loss is multiplied by a scale
before its backward, and the gradient is divided by it before its norm is taken and before its update. Scales are
powers of two, so both are exact wherever float32 does not underflow.
"""

import math
from dataclasses import dataclass, replace

import torch


def _is_power_of_two(value: float) -> bool:
    return 0 < value < math.inf and math.frexp(value)[0] == 0.5


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the scale changes.

    Attributes:
        initial: the first scale.
        growth: factor after ``growth_interval`` good steps in a row.
        backoff: factor after a step that is not finite.
        growth_interval: good steps in a row between two growths.
        smallest: below this the scale does not fall (GradScaler lets it fall to zero, where every gradient is zero).

    Raises:
        ValueError: a factor or scale is no power of two, or does not fit the others.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    smallest: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be a power of two, got {value}"
            for name, value in vars(self).items()
            if name != "growth_interval" and not _is_power_of_two(value)
        ]
        if not self.growth >= 1:
            problems.append(f"growth must be at least 1, got {self.growth}")
        if not 0 < self.backoff < 1:
            problems.append(f"backoff must lie between 0 and 1, got {self.backoff}")
        if self.growth_interval < 1:
            problems.append(f"growth_interval must be at least 1, got {self.growth_interval}")
        if not self.smallest <= self.initial:
            problems.append(f"initial must be at least smallest, {self.smallest}, got {self.initial}")
        if problems:
            raise ValueError("; ".join(problems))


NO_SCALING = LossScaling(initial=1.0, growth=1.0, smallest=1.0)
"""For float32 and bfloat16, whose exponents reach as far down as any gradient."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of the next step; part of the training state.

    Attributes:
        settings: how it changes.
        scale: what the loss is multiplied by before its backward.
        good_steps: steps in a row that were finite since the scale last changed.
    """

    settings: LossScaling
    scale: float
    good_steps: int = 0

    @property
    def reported(self) -> float | None:
        """The scale, or None where nothing is scaled."""
        return None if self.settings == NO_SCALING else self.scale

    def after_step(self, *, finite: bool) -> "LossScale":
        """The scale after a step that was made with this one; ``finite``: whether its loss and gradient were."""
        settings = self.settings
        if not finite:
            return replace(self, scale=max(self.scale * settings.backoff, settings.smallest), good_steps=0)
        if self.good_steps + 1 < settings.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * settings.growth
        return replace(self, scale=grown if grown <= torch.finfo(torch.float32).max else self.scale, good_steps=0)

    def explain(self, reason: str) -> str:
        """Why a step with this scale was skipped."""
        return reason if self.reported is None else f"{reason} at a loss scale of {self.scale:,.15g}"

    def counts_as_skipped(self, *, loss_finite: bool) -> bool:
        """Whether a step that is not finite is a sign that training fails.

        A gradient that overflows while the scale can still fall says only that the scale was too large, and a
        search from 2^16 down may take more such steps than a run may skip. The loss itself is not scaled.
        """
        return not loss_finite or self.scale <= self.settings.smallest


def first_scale(dtype: str, settings: LossScaling | None) -> LossScale:
    """The scale that training in a type starts with; ``settings`` are those of float16, None for the usual ones."""
    used = (settings or LossScaling()) if dtype == "float16" else NO_SCALING
    return LossScale(settings=used, scale=used.initial)
