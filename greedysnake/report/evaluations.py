"""What the losses on held-out text of a run say: perplexity, the best of them, and whether to go on."""

import math
from collections.abc import Sequence

EARLY_STOPPING = "early stopping"
"""How the reason for an early end begins."""

Evaluation = tuple[int, float]
"""Steps done, and the mean loss of a target token then."""


def perplexity(loss: float) -> float:
    """The exponential of a mean loss in nats; infinite where it is too large for a number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def of_training(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Those made after at least a step: what was there before is not the training's doing."""
    return [(step, loss) for step, loss in evaluations if step > 0]


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The lowest loss of the training, the first of equal ones; None without a finite one."""
    finite = [(loss, step) for step, loss in of_training(evaluations) if math.isfinite(loss)]
    if not finite:
        return None
    loss, step = min(finite)
    return step, loss


def early_stop_reason(evaluations: Sequence[Evaluation], patience: int | None, min_delta: float) -> str | None:
    """Why the run ends now, or None while it goes on.

    Args:
        evaluations: all so far, in order.
        patience: evaluations in a row without improvement that end it; None: none do.
        min_delta: a loss is an improvement if it is lower by more than this than the last improvement's.
    """
    if patience is None:
        return None
    best_step, best, waited = 0, math.inf, 0
    for step, loss in of_training(evaluations):
        if loss < best - min_delta:
            best_step, best, waited = step, loss, 0
        else:
            waited += 1
    if waited < patience:
        return None
    times = "1 evaluation" if waited == 1 else f"{waited} evaluations in a row"
    than = f" better than {best:.4f} at step {best_step}" if best_step else " with a finite loss"
    by = f" by more than {min_delta:g}" if min_delta and best_step else ""
    return f"{EARLY_STOPPING}: {times} without a loss{than}{by}"
