"""What a run has done, for its metrics, summary and pictures."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from greedysnake.engine.results import StepResult
from greedysnake.report.evaluations import best_evaluation, perplexity

KEPT_TRACES = 3  # the first steps whose events are kept, beside the last


@dataclass
class RunRecord:
    """What a run has done so far.

    Attributes:
        results: of every step, without its events and schedule: those of a long run would fill memory.
        traced: a few steps with their events, by number: the first three and the last that have any.
        evaluations: step and loss on held-out text.
        tokens_seen: tokens of all steps, padding included.
        target_tokens_seen: of them, those that counted in the loss.
        stopped_by: why the run ended early, or None.
    """

    results: list[StepResult] = field(default_factory=list)
    traced: dict[int, StepResult] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    tokens_seen: int = 0
    target_tokens_seen: int = 0
    stopped_by: str | None = None

    @classmethod
    def of_lines(cls, lines: Iterable[Mapping[str, Any]], loss_before: float | None) -> Self:
        """The record of a run that goes on, from its metrics.

        Args:
            lines: of its metrics file.
            loss_before: on held-out text before the first step, if there was any.
        """
        record = cls(evaluations=[] if loss_before is None else [(0, loss_before)])
        names = {one.name for one in fields(StepResult)} - {"events"}
        for line in lines:
            known: dict[str, Any] = {name: line.get(name) for name in names}
            for name in ("loss", "grad_norm"):
                known[name] = math.nan if known[name] is None else known[name]  # JSON has no NaN
            record.add(StepResult(**known, events=()))
            if "eval_loss" in line:
                loss = line["eval_loss"]
                record.evaluations.append((line["step"], math.nan if loss is None else loss))
        return record

    def add(self, result: StepResult) -> None:
        """Count a step."""
        self.results.append(replace(result, events=(), schedule=None))
        self.tokens_seen += result.tokens
        self.target_tokens_seen += result.target_tokens
        if result.events:
            while len(self.traced) > KEPT_TRACES:
                self.traced.popitem()  # the last one so far
            self.traced[result.step] = result

    def summary(self, seconds: float) -> dict[str, Any]:
        """The contents of ``summary.json``."""
        done = [result for result in self.results if result.skipped is None]
        tokens = self.tokens_seen
        losses = [loss for _, loss in self.evaluations]
        best = best_evaluation(self.evaluations)
        steady = self.results[1:] or self.results
        return {
            "steps": len(self.results),
            "skipped_steps": len(self.results) - len(done),
            "stopped_by": self.stopped_by,
            "first_loss": done[0].loss if done else None,
            "last_loss": done[-1].loss if done else None,
            "first_eval_loss": losses[0] if losses else None,
            "last_eval_loss": losses[-1] if losses else None,
            "last_eval_perplexity": perplexity(losses[-1]) if losses else None,
            "best_eval_loss": best[1] if best else None,
            "best_eval_perplexity": perplexity(best[1]) if best else None,
            "best_eval_step": best[0] if best else None,
            "tokens": tokens,
            "target_tokens": self.target_tokens_seen,
            "seconds": round(seconds, 3),
            "median_step_seconds": statistics.median(result.seconds for result in steady) if steady else None,
            "tokens_per_second": tokens / sum(r.seconds for r in self.results) if self.results else None,
            "ssd_read_bytes": sum(result.ssd_read_bytes for result in self.results),
            "ssd_write_bytes": sum(result.ssd_write_bytes for result in self.results),
            "host_peak_bytes": max((result.host_peak_bytes for result in self.results), default=None),
        }
