"""What a run that goes on may change, and what must be as it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from greedysnake.config import RunConfig, load_config, paths_in, with_absolute_paths
from greedysnake.config.checks import LENGTHS
from greedysnake.data import TokenBatches
from greedysnake.engine.loading import half_loaded
from greedysnake.engine.trainer import Trainer
from greedysnake.errors import ConfigError, DataError
from greedysnake.storage import Store

DATA = "data"
"""Name of a note of the trainer: the fingerprint of the training data."""

TOKENIZER_FOLDER = "tokenizer"

_FIXED = (
    "seed",
    "model",
    "data",
    "training.micro_batches",
    "training.micro_batch_size",
    "training.freeze",
    "lora",
    "engine.layers_per_unit",
    "engine.chunk_elements",
    "engine.second_slot",
    "engine.split_master",
)
"""Settings that decide what is stored, or which data a step has."""

_MOVABLE = ("data.train", "data.evaluation")
"""Of them, those that may be another place: data is compared by what is in it."""


def run_config(run: Path) -> RunConfig:
    """The settings of a run, wherever its folder has been moved to.

    Raises:
        ConfigError: it is not a run folder.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run} is not a run folder: it has no config.yaml. Give the folder that 'run' named in training"
        )
    return load_config(run / "config.yaml").model_copy(update={"run": run})


def resumed_config(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The settings of a run that goes on.

    Raises:
        ConfigError: it is not a run folder, or settings are changed that cannot be.
    """
    before = with_absolute_paths(run_config(run))
    overrides = [*_other_lengths(overrides), *overrides]
    after = with_absolute_paths(load_config(run / "config.yaml", overrides).model_copy(update={"run": before.run}))
    old, new = _flat(before.model_dump()), _flat(after.model_dump())
    problems = [
        f"{name}: {_shown(new.get(name))} cannot be set for a run that began with {_shown(old.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
        and any(name == fixed or name.startswith(f"{fixed}.") for fixed in _FIXED)
        and name != "data.cache"
        and not (name in _MOVABLE and old.get(name) and new.get(name))
    ]
    if any(override.partition("=")[0].strip() == "run" for override in overrides):
        problems.append("run: a run that goes on stays in its folder")
    problems += [
        f"{name}: {path} is not there, with which the run began. Bring it back, or say where it is now: greedysnake "
        f"resume {run} {name}=PLACE"
        for name, value in (("data.train", after.data.train), ("data.evaluation", after.data.evaluation))
        for path in paths_in(value)
        if not path.exists()
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return after


def _other_lengths(overrides: Sequence[str]) -> list[str]:
    """Overrides that take back the length a run had, where it is given another in steps, epochs or tokens."""
    changes = {key.strip(): value.strip() for key, _, value in (one.partition("=") for one in overrides)}
    given = [name for name in LENGTHS if changes.get(f"training.{name}", "null") not in {"null", "~", ""}]
    return [f"training.{name}=null" for name in LENGTHS if name not in given] if len(given) == 1 else []


def has_not_begun(run: Path, folders: Sequence[Path]) -> bool:
    """Whether a run ended while its data was read or its model loaded, so that there is no training to go on with."""
    if (run / "plan.json").exists() or (run / "metrics.jsonl").exists():
        return False
    return Store.contents_of(folders) is None or half_loaded(folders) is not None


def describe_beginning(run: Path, folders: Sequence[Path]) -> str:
    """What becomes of a run that had not begun."""
    found = half_loaded(folders)
    if found is None:
        return f"{run} had not begun, and nothing of its model had been kept. Loading it from the beginning"
    there = f"{found.get('done')} of {found.get('groups')} parts are there"
    return f"{run} had not begun: its model was still being loaded ({there}). Going on with that"


def as_saved(config: RunConfig, model: Path) -> RunConfig:
    """The config with model and tokenizer as the run saved them: the originals may have gone or changed.

    The tokenizer's chat template is saved with it.
    """
    tokenizer, data = config.run / TOKENIZER_FOLDER, config.data
    if own := tokenizer.is_dir():
        data = data.model_copy(update={"chat_template": None})
    found = {"path": model, "config": None, "tokenizer": str(tokenizer) if own else None}
    return config.model_copy(update={"model": config.model.model_copy(update=found), "data": data})


def check_same_data(trainer: Trainer, batches: TokenBatches) -> None:
    """Make sure that the run goes on with the data that it began with.

    Raises:
        DataError: it is not the same.
    """
    if trainer.notes.get(DATA) != batches.fingerprint:
        raise DataError(
            "data: the training text is not what it was when the run began, so the run cannot go on from where it is "
            "in it. Put the files back as they were, or begin a new run from this model (greedysnake export, then "
            "model.path)"
        )


@contextmanager
def moving_bar(console: Console | None, what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for bytes, with their rate; gives what is told bytes so far and in all.

    Args:
        console: where it is shown, while it goes on; None, or no terminal: nowhere.
        what: is being done to the bytes.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = console is not None and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _shown(value: object) -> str:
    """A setting as one would write it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(str(value) if isinstance(value, Path) else value)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
