"""How long a run is, in steps: from the settings, once the size of the data is known."""

from greedysnake.config import RunConfig
from greedysnake.data import TokenBatches
from greedysnake.errors import ConfigError


def planned_steps(config: RunConfig, batches: TokenBatches) -> int:
    """The optimizer steps of the whole run.

    ``training.epochs`` are rounded up to whole steps. ``training.tokens`` are target tokens; they become steps by
    their mean number in a step, so where sequences differ in it, a run that ends within an epoch is a little off.

    Raises:
        ConfigError: there are no steps left after the warm-up.
    """
    training, per_step = config.training, batches.sequences_per_step
    if training.steps is not None:
        return training.steps
    if training.epochs is not None:
        given = f"training.epochs: {training.epochs:g}"
        steps = -(-max(1, round(training.epochs * batches.sequences)) // per_step)
    else:
        assert training.tokens is not None  # exactly one of the three is given
        given = f"training.tokens: {training.tokens:,}"
        steps = -(-training.tokens * batches.sequences // (batches.training.targets * per_step))
    warmup = config.optimizer.warmup_steps
    if warmup >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps: found {warmup}; needs fewer than the {steps:,} steps that {given} comes to"
        )
    return steps


def epochs_at(step: int, batches: TokenBatches) -> float:
    """How often the training sequences have been taken after ``step`` steps."""
    return step * batches.sequences_per_step / batches.sequences


def describe_length(steps: int, batches: TokenBatches) -> str:
    """How long the run is, in a line."""
    targets = round(epochs_at(steps, batches) * batches.training.targets)
    return (
        f"Length: {steps:,} step{'s'[: steps != 1]} of {batches.sequences_per_step:,} sequences, "
        f"{epochs_at(steps, batches):.3g} epochs, about {targets:,} tokens to learn"
    )
