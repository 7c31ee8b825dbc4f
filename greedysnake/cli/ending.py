"""When a run is over."""

from greedysnake.cli.record import RunRecord
from greedysnake.config import RunConfig
from greedysnake.config.checks import LENGTHS
from greedysnake.errors import ConfigError
from greedysnake.report.evaluations import early_stop_reason

SUMMARY_NAME = "summary.json"
"""File of a run folder that is there when, and only when, the run has ended."""


def early_stop(config: RunConfig, record: RunRecord) -> str | None:
    """Why the evaluations so far end the run, if they do."""
    training = config.training
    return early_stop_reason(record.evaluations, training.early_stop, training.early_stop_min_delta)


def check_unfinished(config: RunConfig, done: int, steps: int, record: RunRecord) -> None:
    """Refuse to go on with a run that is over. One that was killed while it ended, ends now.

    Raises:
        ConfigError: it is over; what to change so that it goes on.
    """
    run, training = config.run, config.training
    if not (run / SUMMARY_NAME).is_file():
        return
    if done >= steps:
        name = next(name for name in LENGTHS if getattr(training, name) is not None)
        found = getattr(training, name)
        is_steps = "" if name == "steps" else f", which comes to {steps}"
        more = 2 * done if name == "steps" else 2 * found
        raise ConfigError(
            f"{run} has made {done} steps, and training.{name} is {found}{is_steps}. To go on, ask for more: "
            f"greedysnake resume {run} training.{name}={more}"
        )
    if reason := early_stop(config, record):
        raise ConfigError(
            f"{run} is over after step {done}, {reason}. To go on, allow more: greedysnake resume {run} "
            f"training.early_stop={2 * (training.early_stop or 1)}, or null for no end but the last step"
        )
