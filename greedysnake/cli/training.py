"""A run from its config: everything checked, then trained, with what happened written to the run folder."""

import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from rich.console import Console
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from greedysnake.cli.data import describe_data, load_run_data
from greedysnake.cli.record import RunRecord
from greedysnake.config import RunConfig, dump_config
from greedysnake.data import (
    TokenBatches,
    check_sequence_length,
    check_vocabulary,
    load_tokenizer,
    use_chat_template,
)
from greedysnake.engine.opening import config_of
from greedysnake.engine.results import StepResult
from greedysnake.engine.trainer import Trainer
from greedysnake.errors import ConfigError, DataError, GreedySnakeError
from greedysnake.models.layout import DEFAULT_CHUNK_ELEMENTS
from greedysnake.optim import AdamW, LearningRate
from greedysnake.plan.activations import BatchShape
from greedysnake.report.live import LiveLine
from greedysnake.report.metrics import MetricsFile, write_json_atomic
from greedysnake.report.pictures import draw_loss_curve, draw_timeline
from greedysnake.report.trace import busy_shares, write_trace
from greedysnake.schedule import Resource
from greedysnake.units import format_bytes

T = TypeVar("T")

METRICS_NAME = "metrics.jsonl"
LOSS_PICTURE = "loss.png"
TIMELINE_PICTURE = "timeline.png"
TOKENIZER_FOLDER = "tokenizer"
BROKEN_OFF = "a second interrupt, before the step in flight had ended"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run is made from, checked against each other."""

    model: str | Path | PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    batches: TokenBatches
    mask_bytes: int


def run_training(config: RunConfig, console: Console) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Train as ``config`` says; gives the summary and the evaluation losses by step.

    Everything that can be wrong is found before the first step, and a run that cannot start leaves nothing.

    Raises:
        GreedySnakeError: what is wrong and what to change.
    """
    run = config.run
    if run.exists():
        raise ConfigError(
            f"run: the folder {run} exists already. Give this run another one (run=NAME on the command line), or "
            f"delete it if it is not needed any more"
        )
    start = time.perf_counter()
    created = _make_folder(run)
    trainer = None
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leave nothing behind
        (run / "config.yaml").write_text(dump_config(_with_absolute_storage(config)))
        inputs = prepare_inputs(config)
        inputs.tokenizer.save_pretrained(run / TOKENIZER_FOLDER)
        console.print(describe_data(inputs.batches))
        trainer = make_trainer(config, inputs)
        plan = trainer.plan.as_json() if trainer.plan else {}
        write_json_atomic(run / "plan.json", plan)
        console.print(_describe_plan(trainer, config))
    except BaseException:
        if trainer is not None:
            trainer.close()
        _remove(created)
        raise

    record = RunRecord()
    try:
        train_steps(config, trainer, inputs.batches, record, console)
        trainer.close()
    except GreedySnakeError as error:
        record.stopped_by = str(error)
        console.print(
            f"Saved: the state after step {trainer.last_snapshot}, in {trainer.storage}; greedysnake export {run} OUT "
            f"writes its model."
        )
        raise
    except KeyboardInterrupt:
        record.stopped_by = BROKEN_OFF
        trainer.close()
        console.print(
            f"Broken off. Saved: the weights after step {trainer.last_snapshot}, in {trainer.storage}, without the "
            f"part of their update that was still delayed."
        )
    finally:
        trainer.close()
        summary = finish_run(config, trainer, record, time.perf_counter() - start)
    return summary, record.evaluations


def prepare_inputs(config: RunConfig, cache_dir: Path | None = None) -> Inputs:
    """Model config, tokenizer and data, with every problem of the three in one message.

    Tokens are kept in ``data.cache``, else in ``cache_dir``, else in the run's folder.
    """
    problems: list[str] = []

    def attempt(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except GreedySnakeError as error:
            problems.append(str(error))
            return None

    model = config.model.path if config.model.path is not None else _config_from(config)
    model_config = attempt(lambda: config_of(model))
    tokenizer = attempt(lambda: load_tokenizer(config.model.tokenizer or "bytes"))
    template = config.data.chat_template
    if tokenizer is not None and template is not None:
        attempt(lambda: use_chat_template(tokenizer, template))
    kind = (config.model.config or {}).get("model_type")
    name = str(config.model.path) if config.model.path else f"the {kind} of model.config"
    if model_config is not None:
        text = model_config.get_text_config()
        length = config.data.sequence_length
        positions, vocabulary = getattr(text, "max_position_embeddings", None), text.vocab_size
        attempt(lambda: check_sequence_length(length, positions, name))
        if tokenizer is not None:
            attempt(lambda: check_vocabulary(tokenizer, vocabulary, name))
    paths = [config.data.train, *([config.data.evaluation] if config.data.evaluation else [])]
    for path in (p for group in paths for p in (group if isinstance(group, list) else [group])):
        if not Path(path).exists():
            problems.append(f"data: {path} does not exist")
    data = None
    if not problems and tokenizer is not None and model_config is not None:
        data = attempt(lambda: load_run_data(config, tokenizer, model_config, cache_dir))
    if problems or data is None or tokenizer is None:
        raise DataError("\n".join(problems)) if len(problems) == 1 else ConfigError("\n".join(problems))
    return Inputs(model=model, tokenizer=tokenizer, batches=data.batches, mask_bytes=data.mask_bytes)


def _config_from(config: RunConfig) -> PretrainedConfig:
    values = dict(config.model.config or {})
    return AutoConfig.for_model(values.pop("model_type"), **values)


def make_trainer(config: RunConfig, inputs: Inputs) -> Trainer:
    """The trainer that ``config`` describes."""
    optimizer, engine, training = config.optimizer, config.engine, config.training
    return Trainer(
        inputs.model,
        config.storage_folders,
        optimizer=AdamW(
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            decay_norms_and_biases=optimizer.decay_norms_and_biases,
            max_grad_norm=optimizer.max_grad_norm,
        ),
        learning_rate=LearningRate(
            peak=optimizer.lr,
            shape=optimizer.lr_schedule,
            steps=training.steps,
            warmup_steps=optimizer.warmup_steps,
            min_ratio=optimizer.min_lr_ratio,
        ),
        dtype=config.model.dtype,
        device=engine.device,
        host_memory=engine.host_memory,
        device_memory=engine.device_memory,
        delayed_share=engine.delayed_share,
        schedule=engine.schedule,
        seed=config.seed,
        layers_per_unit=engine.layers_per_unit,
        snake=engine.snake,
        boundaries=None if engine.boundaries == "auto" else engine.boundaries,
        gradients=None if engine.gradients == "auto" else engine.gradients,
        resident_weights=engine.resident_weights,
        resident_state=engine.resident_state,
        snapshot_every=training.snapshot_every,
        chunk_elements=engine.chunk_elements or DEFAULT_CHUNK_ELEMENTS,
        max_skipped_steps=training.max_skipped_steps,
        batch=BatchShape(
            micro_batches=training.micro_batches,
            rows=training.micro_batch_size,
            tokens=config.data.sequence_length,
            mask_bytes=inputs.mask_bytes,
        ),
    )


def train_steps(
    config: RunConfig, trainer: Trainer, batches: TokenBatches, record: RunRecord, console: Console
) -> None:
    """The training loop: a step, its metrics, now and then an evaluation."""
    steps = config.training.steps
    with (
        LiveLine(console) as live,
        MetricsFile(config.run / METRICS_NAME) as metrics,
        stopping_politely(live.message) as stop,
    ):
        for step in range(steps):
            if step == 0:
                _evaluate(config, trainer, batches, record, live)
            result = trainer.step(batches.step(step))
            record.add(result)
            shares = busy_shares(result.events, result.seconds)
            if result.skipped:
                live.message(f"step {result.step} skipped, nothing changed: {result.skipped}")
            evaluated = None
            if result.step == steps or (config.training.eval_every and result.step % config.training.eval_every == 0):
                evaluated = _evaluate(config, trainer, batches, record, live)
            metrics.write(_metrics_line(result, record, shares, evaluated))
            _show(live, result, record, shares, steps)
            if stop.reason:
                record.stopped_by = stop.reason
                live.message(f"Stopped by {stop.reason} after step {result.step}.")
                break


def _evaluate(
    config: RunConfig, trainer: Trainer, batches: TokenBatches, record: RunRecord, live: LiveLine
) -> float | None:
    """Loss on held-out sequences, if there are any."""
    size = config.training.micro_batch_size
    count = -(-config.training.eval_sequences // size)
    if not batches.evaluation_sequences:
        return None
    loss = trainer.evaluate(islice(batches.evaluation(size), count))
    record.evaluations.append((trainer.steps_done, loss))
    live.message(f"step {trainer.steps_done}: loss on held-out text {loss:.4f}")
    return loss


def _metrics_line(
    result: StepResult, record: RunRecord, shares: dict[str, float], evaluated: float | None
) -> dict[str, Any]:
    line = {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "clipped": result.clipped,
        "lr": result.lr,
        "tokens": result.tokens,
        "tokens_seen": record.tokens_seen,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds,
        "ssd_read_bytes": result.ssd_read_bytes,
        "ssd_write_bytes": result.ssd_write_bytes,
        "host_peak_bytes": result.host_peak_bytes,
        "device_peak_bytes": None,
        "busy": shares,
        "skipped": result.skipped,
    }
    return line if evaluated is None else {**line, "eval_loss": evaluated}


def _show(live: LiveLine, result: StepResult, record: RunRecord, shares: dict[str, float], steps: int) -> None:
    recent = [earlier.seconds for earlier in record.results[-20:]]
    live.update(
        result.step,
        steps,
        loss=result.loss,
        tokens_per_second=result.tokens / result.seconds,
        eta_s=(steps - result.step) * statistics.mean(recent),
        bottleneck=max(shares, key=lambda name: shares[name]) if result.events else None,
        read_rate=_rate(result, Resource.SSD_READ, shares[Resource.SSD_READ]),
        write_rate=_rate(result, Resource.SSD_WRITE, shares[Resource.SSD_WRITE]),
        host_bytes=result.host_peak_bytes,
    )


def _rate(result: StepResult, resource: Resource, busy_share: float) -> float | None:
    """Bytes per second that a resource reached while it was busy."""
    moved = sum(event.bytes for event in result.events if event.resource == resource)
    return moved / (busy_share * result.seconds) if moved and busy_share else None


def finish_run(config: RunConfig, trainer: Trainer, record: RunRecord, seconds: float) -> dict[str, Any]:
    """Summary, pictures and trace."""
    summary = record.summary(seconds)
    write_json_atomic(config.run / "summary.json", summary)
    losses = [(result.step, result.loss) for result in record.results if result.skipped is None]
    if losses:
        draw_loss_curve(config.run / LOSS_PICTURE, losses, record.evaluations)
    traced = list(record.traced.values())
    if traced:
        names = trainer.skeleton.unit_names
        last = traced[-1]
        title = f"Step {last.step}: {last.tokens:,} tokens in {last.seconds:.2f} s"
        draw_timeline(config.run / TIMELINE_PICTURE, last.events, names, title)
        write_trace(config.run / "trace.json", {r.step: r.events for r in (*traced[1:3], last)}, names)
    return summary


class _Stop:
    """Whether, and by what, the run was asked to stop."""

    reason: str | None = None


@contextmanager
def stopping_politely(say: Callable[[str], None]) -> Iterator[_Stop]:
    """Let the step in flight end on the first Ctrl-C or SIGTERM; a second one breaks it off."""
    stop = _Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.reason:
            raise KeyboardInterrupt
        stop.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        say(f"{stop.reason}: ending after the step in flight; once more to break it off.")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe_plan(trainer: Trainer, config: RunConfig) -> str:
    plan = trainer.plan
    if plan is None:
        return ""
    parameters = sum(slot.elements for layout in trainer.skeleton.layouts for slot in layout.parameters)
    described = plan.as_json()
    ssd, memory = described["ssd"], described["host_memory"]
    return (
        f"Model: {parameters / 1e6:,.1f} M parameters in {len(plan.shape.units)} units, {config.model.dtype}\n"
        f"Disk: {format_bytes(trainer.disk_bytes)} in {trainer.storage}; a step reads "
        f"{format_bytes(ssd['read_bytes_per_step'])} and writes {format_bytes(ssd['write_bytes_per_step'])}\n"
        f"Host memory: about {format_bytes(memory['expected_bytes'])} of {format_bytes(memory['budget_bytes'])}; "
        f"{torch.get_num_threads()} compute threads"
    )


def _with_absolute_storage(config: RunConfig) -> RunConfig:
    """The config with a storage folder that is found from anywhere."""
    if config.engine.storage is None:
        return config
    storage = [folder.resolve() for folder in config.engine.storage]
    return config.model_copy(update={"engine": config.engine.model_copy(update={"storage": storage})})


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
