"""The training loop as a person sees it: steps, evaluations, metrics, the live line, and what is left behind."""

import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any

from rich.console import Console

from greedysnake.cli.predicted import predicted_and_measured
from greedysnake.cli.record import RunRecord
from greedysnake.cli.samples import Sampler
from greedysnake.config import RunConfig
from greedysnake.data import TokenBatches
from greedysnake.engine.results import StepResult
from greedysnake.engine.trainer import Trainer
from greedysnake.report.live import LiveLine
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
    sampler: Sampler | None = None,
) -> None:
    """The training loop, from where the trainer is: a step, its metrics, now and then an evaluation or samples."""
    steps = config.training.steps
    with (
        LiveLine(console) as live,
        MetricsFile(config.run / METRICS_NAME) as metrics,
        stopping_politely(live.message) as stop,
    ):
        for step in range(trainer.steps_done, steps):
            if step == 0:
                trainer.notes[LOSS_BEFORE] = _evaluate(config, trainer, batches, record, live)
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
            if sampler is not None and sampler.due(result.step, steps):
                sampler.write(trainer, live.message)
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
        "loss_scale": result.loss_scale,
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
    summary = record.summary(seconds) | predicted_and_measured(trainer.plan, record)
    summary["parameters"], summary["trained_parameters"] = (
        trainer.skeleton.parameter_count,
        trainer.skeleton.trained_count,
    )
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
