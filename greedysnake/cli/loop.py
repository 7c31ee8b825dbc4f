"""The training loop as a person sees it: steps, evaluations, metrics, the live line, and what is left behind."""

import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any

from rich.console import Console

from greedysnake.cli.best import find_kept, keep_if_best
from greedysnake.cli.ending import SUMMARY_NAME, early_stop
from greedysnake.cli.length import epochs_at
from greedysnake.cli.predicted import predicted_and_measured
from greedysnake.cli.record import RunRecord
from greedysnake.cli.samples import Sampler
from greedysnake.config import RunConfig
from greedysnake.data import TokenBatches
from greedysnake.engine.results import StepResult
from greedysnake.engine.trainer import Trainer
from greedysnake.report.evaluations import perplexity
from greedysnake.report.live import LiveLine
from greedysnake.report.loggers import Loggers
from greedysnake.report.memory import step_memory
from greedysnake.report.metrics import MetricsFile, write_json_atomic
from greedysnake.report.pictures import draw_loss_curve, draw_timeline
from greedysnake.report.trace import busy_shares, write_trace
from greedysnake.schedule import Resource

METRICS_NAME = "metrics.jsonl"
LOSS_PICTURE = "loss.png"
TIMELINE_PICTURE = "timeline.png"
LOSS_BEFORE = "evaluation_loss_before"
"""Name of a note of the trainer: loss on held-out text before the first step."""


def train_steps(
    config: RunConfig,
    trainer: Trainer,
    batches: TokenBatches,
    record: RunRecord,
    console: Console,
    *,
    steps: int,
    loggers: Loggers,
    sampler: Sampler | None = None,
) -> None:
    """The training loop, from where the trainer is: a step, its metrics, now and then an evaluation or samples."""
    training = config.training
    with (
        LiveLine(console) as live,
        MetricsFile(config.run / METRICS_NAME) as metrics,
        stopping_politely(live.message) as stop,
    ):
        if trainer.steps_done and _catch_up(config, trainer, record, live, sampler, steps=steps):
            return
        for step in range(trainer.steps_done, steps):
            if step == 0:
                trainer.notes[LOSS_BEFORE] = before = _evaluate(config, trainer, batches, record, live)
                if before is not None:
                    loggers.write({"step": 0, **_evaluation_metrics(before)})
            result = trainer.step(batches.step(step))
            record.add(result)
            shares = busy_shares(result.events, result.seconds)
            if result.skipped:
                live.message(f"step {result.step} skipped, nothing changed: {result.skipped}")
            evaluated = None
            if result.step == steps or (training.eval_every and result.step % training.eval_every == 0):
                evaluated = _evaluate(config, trainer, batches, record, live)
            line = _metrics_line(result, record, shares, evaluated, epochs_at(result.step, batches))
            metrics.write(line)
            loggers.write(line)
            _show(live, result, record, shares, steps)
            if evaluated is not None:
                _keep_if_best(config, trainer, record, live)
            if sampler is not None and sampler.due(result.step, steps):
                sampler.write(trainer, live.message)
            if stop.reason:
                record.stopped_by = stop.reason
                live.message(f"Stopped by {stop.reason} after step {result.step}.")
                break
            if evaluated is not None and result.step < steps and (reason := early_stop(config, record)):
                record.stopped_by = reason
                live.message(f"Stopped after step {result.step}, {reason}.")
                break


def _catch_up(
    config: RunConfig, trainer: Trainer, record: RunRecord, live: LiveLine, sampler: Sampler | None, *, steps: int
) -> bool:
    """After a kill between a step and what follows from it: do that now; gives whether the run ends here."""
    evaluated = bool(record.evaluations) and record.evaluations[-1][0] == trainer.steps_done
    if evaluated:
        _keep_if_best(config, trainer, record, live)
    if sampler is not None:
        sampler.catch_up(trainer, steps, live.message)
    if evaluated and trainer.steps_done < steps:
        record.stopped_by = early_stop(config, record)
    return record.stopped_by is not None


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
    live.message(f"step {trainer.steps_done}: loss on held-out text {loss:.4f}, perplexity {perplexity(loss):.4g}")
    return loss


def _keep_if_best(config: RunConfig, trainer: Trainer, record: RunRecord, live: LiveLine) -> None:
    """Keep the weights that were just evaluated, if that is wanted and they are the best."""
    if config.training.keep_best and (kept := keep_if_best(trainer, config.run, record.evaluations[-1])):
        live.message(f"step {kept.step}: the lowest loss on held-out text so far; these weights are kept")


def _evaluation_metrics(loss: float) -> dict[str, float]:
    return {"eval_loss": loss, "eval_perplexity": perplexity(loss)}


def _metrics_line(
    result: StepResult, record: RunRecord, shares: dict[str, float], evaluated: float | None, epoch: float
) -> dict[str, Any]:
    line = {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "clipped": result.clipped,
        "loss_scale": result.loss_scale,
        "lr": result.lr,
        "epoch": epoch,
        "tokens": result.tokens,
        "target_tokens": result.target_tokens,
        "tokens_seen": record.tokens_seen,
        "target_tokens_seen": record.target_tokens_seen,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds,
        "ssd_read_bytes": result.ssd_read_bytes,
        "ssd_write_bytes": result.ssd_write_bytes,
        "host_peak_bytes": result.host_peak_bytes,
        "device_peak_bytes": None,
        "busy": shares,
        "skipped": result.skipped,
    }
    return line if evaluated is None else {**line, **_evaluation_metrics(evaluated)}


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


def finish_run(config: RunConfig, trainer: Trainer, record: RunRecord, seconds: float, *, steps: int) -> dict[str, Any]:
    """Summary, pictures and trace."""
    kept = find_kept(config.run)
    summary = {
        **record.summary(seconds),
        **predicted_and_measured(trainer.plan, record),
        "parameters": trainer.skeleton.parameter_count,
        "trained_parameters": trainer.skeleton.trained_count,
        "planned_steps": steps,
        "best_model": None if kept is None else kept.as_json(),
    }
    write_json_atomic(config.run / SUMMARY_NAME, summary)
    losses = [(result.step, result.loss) for result in record.results if result.skipped is None]
    if losses:
        draw_loss_curve(config.run / LOSS_PICTURE, losses, record.evaluations)
    traced = list(record.traced.values())
    if traced:
        names = trainer.skeleton.unit_names
        last = traced[-1]
        title = f"Step {last.step}: {last.tokens:,} tokens in {last.seconds:.2f} s"
        draw_timeline(config.run / TIMELINE_PICTURE, last.events, names, title)
        shown = (*traced[1:3], last)
        memory = {r.step: step_memory(r.schedule, r.events) for r in shown if r.schedule is not None}
        write_trace(config.run / "trace.json", {r.step: r.events for r in shown}, names, memory)
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
