"""A run from its config: everything checked, then trained, with what happened written to the run folder."""

import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from greedysnake.cli.best import check_room, describe_best
from greedysnake.cli.data import describe_data
from greedysnake.cli.ending import SUMMARY_NAME, check_unfinished
from greedysnake.cli.folder import make_last, writing
from greedysnake.cli.inputs import Inputs, prepare_inputs
from greedysnake.cli.length import describe_length
from greedysnake.cli.loop import LOSS_BEFORE, METRICS_NAME, finish_run, train_steps
from greedysnake.cli.predicted import describe_prediction, write_plan
from greedysnake.cli.record import RunRecord
from greedysnake.cli.resuming import (
    TOKENIZER_FOLDER,
    as_saved,
    check_same_data,
    describe_beginning,
    has_not_begun,
    moving_bar,
    resumed_config,
)
from greedysnake.cli.sample_memory import check_samples
from greedysnake.cli.samples import SAMPLES_NAME, Sampler
from greedysnake.cli.trainer import batch_shape, changeable_settings, learning_rate, make_trainer
from greedysnake.config import RunConfig, dump_config, with_absolute_paths
from greedysnake.engine.loading import half_loaded
from greedysnake.engine.opening import DTYPES, MODEL_FOLDER
from greedysnake.engine.products import float32_types
from greedysnake.engine.settings import TrainerSettings
from greedysnake.engine.trainer import Trainer
from greedysnake.errors import ConfigError, GreedySnakeError, StorageError
from greedysnake.models.skeleton import Skeleton
from greedysnake.report.loggers import Loggers, missing_packages, open_loggers
from greedysnake.report.metrics import cut_metrics, metrics_until, write_text_atomic
from greedysnake.storage import FolderBudget, remove_store
from greedysnake.units import format_bytes

ONE_SLOT = (
    "Snapshots: none while it runs, as engine.second_slot is false: a run that is killed or loses power has to begin "
    "again. One that ends, or is stopped with Ctrl-C, can be resumed.\n"
)

BROKEN_OFF = "a second interrupt, before the step in flight had ended"


def run_training(config: RunConfig, console: Console) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Train as ``config`` says; gives the summary and the evaluation losses by step.

    Everything that can be wrong is found before the first step, and a run that cannot start leaves nothing.

    Raises:
        GreedySnakeError: what is wrong and what to change.
    """
    run = config.run
    if run.exists():
        raise ConfigError(
            f"run: the folder {run} exists already. To go on with its run: greedysnake resume {run}. Or give this run "
            f"another folder (run=NAME on the command line), or delete that one if it is not needed any more"
        )
    _check_packages(config)
    start = time.perf_counter()
    return _begin(config, console, _make_folder(run), start)


def _begin(
    config: RunConfig, console: Console, created: list[Path], start: float
) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Begin a run in its folder.

    Args:
        config: the run's settings.
        console: to print to.
        created: folders that were made for it, and go if it cannot begin; empty for one whose loading was broken off.
        start: when it began.
    """
    run = config.run
    trainer = None
    after = ExitStack()
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        with writing(run):
            write_text_atomic(run / "config.yaml", dump_config(with_absolute_paths(config)))
        inputs = prepare_inputs(config)
        with writing(run):
            inputs.tokenizer.save_pretrained(run / TOKENIZER_FOLDER)
        make_last(run / TOKENIZER_FOLDER, created)
        console.print(describe_data(inputs.batches))
        console.print(describe_length(inputs.steps, inputs.batches))
        sampler = Sampler.of(config, inputs.tokenizer)
        loggers = after.enter_context(_loggers(config, 0, console))
        with moving_bar(console, "Loading") as progress:
            trainer = make_trainer(config, inputs, progress)
        check_samples(sampler, trainer)
        with writing(run):
            write_plan(run, trainer, inputs.steps)
        console.print(_describe_plan(trainer, config))
        if config.training.keep_best:
            check_room(trainer, run)
    except BaseException as error:
        after.close()
        if trainer is not None:
            with suppress(GreedySnakeError):  # one error is told
                trainer.close()
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted and trainer is None and half_loaded(config.storage_folders):
            told = f"Interrupted while the model was being loaded. greedysnake resume {run} goes on with that."
            console.print(told, markup=False)
            raise
        if created and trainer is not None:
            with suppress(GreedySnakeError):
                remove_store(trainer.settings.storage)  # which may lie outside the run's folder
        _remove(created)
        if interrupted:
            left = "nothing was kept" if created else f"greedysnake resume {run} begins it"
            console.print(f"Interrupted before training began; {left}.", markup=False)
        raise

    with after:
        return _train(config, trainer, inputs, RunRecord(), console, loggers=loggers, sampler=sampler, start=start)


def resume_training(
    run: Path, overrides: Sequence[str], console: Console
) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Go on with a run that was stopped, killed, or is to take more steps; gives what :func:`run_training` does.

    Raises:
        GreedySnakeError: what is wrong and what to change; the run stays as it is.
    """
    start = time.perf_counter()
    config = resumed_config(run, overrides)
    _check_packages(config)
    after = ExitStack()
    folders = config.storage_folders
    if has_not_begun(run, folders):
        console.print(describe_beginning(run, folders))
        return _begin(config, console, [], start)
    console.print(f"Checking the last snapshot of {run}, in {', '.join(map(str, folders))}")
    with moving_bar(console, "Checking") as progress:
        trainer = Trainer.resume(folders, progress=progress, **changeable_settings(config))
    try:
        inputs = prepare_inputs(as_saved(config, trainer.storage / MODEL_FOLDER))
        check_same_data(trainer, inputs.batches)
        lines = metrics_until(run / METRICS_NAME, trainer.steps_done)
        record = RunRecord.of_lines(lines, trainer.notes.get(LOSS_BEFORE))
        check_unfinished(config, trainer.steps_done, inputs.steps, record)
        sampler = Sampler.of(config, inputs.tokenizer)
        trainer.use_learning_rate(learning_rate(config, inputs.steps))
        trainer.reserve(batch_shape(config, inputs))
        check_samples(sampler, trainer)
        if config.training.keep_best:
            check_room(trainer, run)
        loggers = after.enter_context(_loggers(config, trainer.steps_done, console))
        with writing(run):
            (run / SUMMARY_NAME).unlink(missing_ok=True)  # the run is going again
            write_text_atomic(run / "config.yaml", dump_config(config))
            write_plan(run, trainer, inputs.steps)
            cut_metrics(run / METRICS_NAME, trainer.steps_done)
            cut_metrics(run / SAMPLES_NAME, trainer.steps_done)
    except BaseException:
        after.close()
        with suppress(GreedySnakeError):  # one error is told
            trainer.close()
        raise
    console.print(describe_data(inputs.batches))
    console.print(describe_length(inputs.steps, inputs.batches))
    console.print(_describe_plan(trainer, config))
    console.print(f"Going on after step {trainer.steps_done} of {inputs.steps}")
    earlier = sum(result.seconds for result in record.results)
    with after:
        start -= earlier
        return _train(config, trainer, inputs, record, console, loggers=loggers, sampler=sampler, start=start)


def _check_packages(config: RunConfig) -> None:
    """Make sure that what the metrics are to be sent with is installed."""
    wanted = config.logging
    if missing := missing_packages(tensorboard=wanted.tensorboard, wandb=wanted.wandb is not None):
        raise ConfigError("\n".join(missing))


def _loggers(config: RunConfig, steps_done: int, console: Console) -> AbstractContextManager[Loggers]:
    say = partial(console.print, markup=False)
    return open_loggers(config.run, config.model_dump(mode="json"), steps_done=steps_done, say=say)


def _train(
    config: RunConfig,
    trainer: Trainer,
    inputs: Inputs,
    record: RunRecord,
    console: Console,
    *,
    loggers: Loggers,
    sampler: Sampler | None,
    start: float,
) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Train to the end, and leave summary, pictures and trace however it ends."""
    run, failed = config.run, True
    try:
        with writing(run):
            train_steps(
                config,
                trainer,
                inputs.batches,
                record,
                console,
                steps=inputs.steps,
                loggers=loggers,
                sampler=sampler,
            )
        trainer.close()
        failed = False
    except GreedySnakeError as error:
        record.stopped_by = str(error)
        with suppress(GreedySnakeError):  # one error is told
            trainer.close()
        console.print(
            f"Saved: the state after step {trainer.last_snapshot}, in {trainer.storage}. greedysnake resume {run} goes "
            f"on from there; greedysnake export {run} OUT writes its model."
        )
        raise
    except KeyboardInterrupt:
        record.stopped_by = BROKEN_OFF
        trainer.close()
        console.print(
            f"Broken off. Saved: the state after step {trainer.last_snapshot}, in {trainer.storage}. greedysnake "
            f"resume {run} goes on from there."
        )
        failed = False
    finally:
        trainer.close()
        with suppress(StorageError) if failed else nullcontext(), writing(run):
            summary = finish_run(config, trainer, record, time.perf_counter() - start, steps=inputs.steps)
    return summary, record.evaluations


def _describe_plan(trainer: Trainer, config: RunConfig) -> str:
    plan = trainer.plan
    if plan is None:
        return ""
    skeleton = trainer.skeleton
    trained = "" if skeleton.trained_count == skeleton.parameter_count else f" ({_describe_trained(skeleton)})"
    described = plan.as_json()
    ssd, memory = described["ssd"], described["host_memory"]
    return (
        f"Model: {skeleton.parameter_count / 1e6:,.1f} M parameters{trained} in {len(plan.shape.units)} units, "
        f"{config.model.dtype}\n"
        f"{_describe_products(trainer.settings)}"
        f"Disk: {', '.join(map(_describe_folder, trainer.disk_use()))}; a step reads "
        f"{format_bytes(ssd['read_bytes_per_step'])} and writes {format_bytes(ssd['write_bytes_per_step'])}\n"
        f"{describe_best(trainer, config.run) if config.training.keep_best else ''}"
        f"{'' if config.engine.second_slot else ONE_SLOT}"
        f"Host memory: about {format_bytes(memory['expected_bytes'])} of {format_bytes(memory['budget_bytes'])}; "
        f"{torch.get_num_threads()} compute threads\n"
        f"{describe_prediction(plan)}"
    )


def _describe_products(settings: TrainerSettings) -> str:
    """That matrices of 16-bit numbers are multiplied by way of float32, where they are."""
    if settings.device.startswith("cuda") or DTYPES[settings.dtype] not in float32_types(settings.matrix_products):
        return ""
    asked = settings.matrix_products == "float32"
    why = "as engine.matrix_products says" if asked else "as this processor has no instructions for them"
    return f"Products of {settings.dtype} matrices by way of float32, {why}\n"


def _describe_trained(skeleton: Skeleton) -> str:
    """How many parameters are trained, and which."""
    count, share = skeleton.trained_count, skeleton.trained_count / skeleton.parameter_count
    which = "the rest is frozen" if skeleton.lora is None else f"LoRA adapters of rank {skeleton.lora.r}"
    return f"{count:,} of them trained, {share:.2%}: {which}"


def _describe_folder(use: FolderBudget) -> str:
    return f"{format_bytes(use.needed)} in {use.folder} ({format_bytes(use.left)} left there)"


def _make_folder(path: Path) -> list[Path]:
    """Make a folder and its missing parents; gives those made, outermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run: cannot make the folder {path}: {error.strerror}") from error
    return missing[::-1]


def _remove(created: list[Path]) -> None:
    """Remove a run folder that could not start, and the parents made for it if nothing else is in them."""
    if created:
        shutil.rmtree(created[-1], ignore_errors=True)
        with suppress(OSError):
            for parent in reversed(created[:-1]):
                parent.rmdir()
