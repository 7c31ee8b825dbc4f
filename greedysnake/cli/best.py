"""The weights of the lowest loss on held-out text: kept beside the run while it trains, and exported.

They are an ordinary model folder, ``<run>/best/step-N``, that appears when it is complete and on the disk; only then
is the former one removed. So whenever a run is killed there is a whole one, and of two the later is the better.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from greedysnake.cli.folder import make_last, writing
from greedysnake.cli.resuming import TOKENIZER_FOLDER, run_config
from greedysnake.data import load_tokenizer
from greedysnake.engine.trainer import Trainer
from greedysnake.errors import ConfigError, ModelError, StorageError
from greedysnake.models.export import DEFAULT_SHARD_BYTES
from greedysnake.report.evaluations import Evaluation
from greedysnake.report.metrics import write_json_atomic
from greedysnake.storage import System
from greedysnake.storage.budget import free_bytes
from greedysnake.storage.small_files import flush_folder
from greedysnake.units import format_bytes, parse_bytes

BEST_FOLDER = "best"
_NOTE = "evaluation.json"
_NAME = re.compile(r"step-(\d+)")
_REMAINS = re.compile(r"\.*step-\d+.*")


@dataclass(frozen=True, kw_only=True)
class KeptModel:
    """Weights that are kept.

    Attributes:
        folder: a model folder.
        step: steps done when they were the newest.
        eval_loss: their loss on held-out text.
    """

    folder: Path
    step: int
    eval_loss: float

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "folder": str(self.folder)}


def find_kept(run: Path) -> KeptModel | None:
    """The best weights that a run has kept.

    Raises:
        StorageError: they cannot be read.
    """
    folder = run / BEST_FOLDER
    try:
        steps = [int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))]
        if not steps:
            return None
        newest = folder / f"step-{max(steps)}"
        note = json.loads((newest / _NOTE).read_text(encoding="utf-8"))
        return KeptModel(folder=newest, step=max(steps), eval_loss=float(note["eval_loss"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"cannot read the best weights in {folder}: {error}. Delete it to go on without") from error


def keep_if_best(trainer: Trainer, run: Path, evaluation: Evaluation) -> KeptModel | None:
    """Keep the trainer's weights if their loss is the lowest; gives them if so.

    The trainer takes a snapshot first: should the run be killed before they are kept, it goes on from here and keeps
    them then, and never from a step before the one that is kept.

    Args:
        trainer: just evaluated.
        run: the run's folder.
        evaluation: its step and loss.

    Raises:
        ModelError, StorageError: they cannot be written; the former ones stay.
    """
    step, loss = evaluation
    former = find_kept(run)
    if not loss < (former.eval_loss if former else float("inf")):  # nor is what is not finite
        return None
    if trainer.last_snapshot < step:
        trainer.snapshot()
    folder = run / BEST_FOLDER
    _remove_remains(folder, keep=former)
    partial = folder / f".step-{step}"
    trainer.save_pretrained(partial)
    if (run / TOKENIZER_FOLDER).is_dir():
        load_tokenizer(run / TOKENIZER_FOLDER).save_pretrained(partial)
    with writing(run):
        write_json_atomic(partial / _NOTE, {"steps_done": step, "eval_loss": loss})
        make_last(partial, [])
        kept = KeptModel(folder=folder / f"step-{step}", step=step, eval_loss=loss)
        partial.rename(kept.folder)
        for changed in (folder, run):
            flush_folder(System(), changed)
        _remove_remains(folder, keep=kept)
    return kept


def _remove_remains(folder: Path, keep: KeptModel | None) -> None:
    """Remove what is kept no longer, and what a run that was killed left half written."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _REMAINS.fullmatch(path.name) and (keep is None or path != keep.folder):
            shutil.rmtree(path, ignore_errors=True)


def best_bytes(trainer: Trainer) -> int:
    """Bytes of disk that the weights take."""
    slots = (slot for layout in trainer.skeleton.layouts for slot in layout.parameters)
    return sum(slot.elements * slot.dtype.itemsize for slot in slots)


def describe_best(trainer: Trainer, run: Path) -> str:
    """The disk that the best weights take, in a line."""
    size = best_bytes(trainer)
    return (
        f"Best weights: {format_bytes(size)} more in {run / BEST_FOLDER}, {format_bytes(2 * size)} while better ones "
        f"replace them\n"
    )


def check_room(trainer: Trainer, run: Path) -> None:
    """Make sure that there is disk to keep the best weights, and to replace them.

    Raises:
        StorageError: there is not.
    """
    needed = best_bytes(trainer) * (1 if find_kept(run) else 2)
    free = free_bytes(run, System())
    if free < needed:
        raise StorageError(
            f"training.keep_best: {run / BEST_FOLDER} needs {format_bytes(needed)} of disk ({needed:,} bytes), for the "
            f"best weights and those that replace them, and beside the run's storage {format_bytes(free)} is free "
            f"({free:,} bytes). Free {format_bytes(needed - free)} there, choose a run folder on a larger disk, or set "
            f"training.keep_best=false"
        )


def refuse_with_best(*, dtype: str | None, max_shard_size: int | str, overwrite: bool, merge: bool) -> None:
    """Refuse what says how a model is written: the best weights are a copy of what was kept.

    Raises:
        ConfigError: naming every such option that was given.
    """
    try:
        sized = parse_bytes(max_shard_size) != DEFAULT_SHARD_BYTES
    except ValueError:
        sized = True
    given = {
        "--dtype": dtype is not None,
        "--max-shard-size": sized,
        "--overwrite": overwrite,
        "--merge": merge,
    }
    if named := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{', '.join(named)}: not with --best, which copies the weights as they were kept. Leave out --best, "
            f"for the last weights, or {' and '.join(named)}"
        )


def export_best(run: Path, out: Path) -> dict[str, Any]:
    """Copy the best weights of a run, with its tokenizer; the run may still be going.

    Returns:
        ``steps_done`` and ``eval_loss`` when they were the newest, ``folder``, and whether it holds an
        ``adapter`` alone.

    Raises:
        ConfigError: ``run`` is not a run folder, or has kept none.
        ModelError: ``out`` exists or cannot be written.
    """
    kept = find_kept(run_config(run).run)
    if kept is None:
        raise ConfigError(
            f"{run} has kept no best weights: training.keep_best was not true, or nothing was evaluated yet. Without "
            f"--best, greedysnake export gives its last ones"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists already and is not empty. Choose another folder for the export")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        shutil.copytree(kept.folder, partial, ignore=shutil.ignore_patterns(_NOTE))
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except FileNotFoundError as error:
        raise ModelError(f"{kept.folder} was replaced by better weights meanwhile; export again") from error
    except OSError as error:
        raise ModelError(f"cannot write the model folder {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {
        "folder": str(out),
        "adapter": (out / "adapter_config.json").is_file(),
        "steps_done": kept.step,
        "eval_loss": kept.eval_loss,
    }
