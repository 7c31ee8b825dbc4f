"""What one run of a schedule is given, and what it finds out."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from greedysnake.engine.queues import StepEndedError
from greedysnake.optim import GradientNorm, UpdateScalars


class NonFiniteStepError(StepEndedError):
    """The loss or the gradient of the step in flight is not finite."""


@dataclass
class StepWork:
    """What one run of a schedule is given and what it finds out.

    Attributes:
        prompt: scalars of this step's updates; their clip factor is known once the norm is.
        delayed: scalars of the updates that the step before left.
        max_grad_norm: largest gradient norm, None for no clipping.
        must_be_finite: whether a loss or gradient that is not ends the step.
        contents: what a commit on the way says about the state that it commits.
        committed: whether there was one.
        losses: loss of each micro-batch, its share of the step's.
        norms: norm of every parameter's gradient, by name.
        gradient: norm of the whole gradient.
    """

    prompt: UpdateScalars
    delayed: UpdateScalars | None = None
    max_grad_norm: float | None = None
    must_be_finite: bool = True
    contents: dict[str, Any] = field(default_factory=dict)
    committed: bool = False
    losses: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    gradient: GradientNorm | None = None
