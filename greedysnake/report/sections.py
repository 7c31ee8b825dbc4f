"""The parts of a report page, from the state of the run down to its settings, as HTML."""

import math
from collections.abc import Callable, Sequence

from greedysnake.report import facts, wording
from greedysnake.report.cards import card
from greedysnake.report.charts import Series, line_chart, share_rows
from greedysnake.report.evaluations import EARLY_STOPPING, best_evaluation, perplexity
from greedysnake.report.events import RESOURCES, resource_words
from greedysnake.report.run_files import RunFiles, mapping, number
from greedysnake.report.sections_memory import budget_bytes, memory_card, memory_chart, peak_bytes, step_memory_card
from greedysnake.report.sections_predicted import predicted_card
from greedysnake.report.sections_rates import rates_card
from greedysnake.report.sections_time import bottleneck_words, kinds_card, timeline_card
from greedysnake.report.wording import known, safe

_TIERS = {"device": "device memory", "host": "host memory", "ssd": "SSD"}


def status(files: RunFiles) -> str:
    """One line: how many steps of how many, and how the run ended."""
    done, planned = _steps_done(files), _steps_planned(files)
    wanted = f" of {planned:,.0f}" if planned is not None else ""
    stopped_by = files.summary.get("stopped_by")
    good = False
    if str(stopped_by).startswith(EARLY_STOPPING):
        words, good = f"Ended after {done:,}{wanted} steps by {stopped_by}", True
    elif stopped_by:
        words = f"Stopped early by {stopped_by}, after {done:,}{wanted} steps"
    elif not files.summary:
        words = f"No end was recorded: the run is still going or was killed, after {done:,}{wanted} steps"
    elif planned is not None and done < planned:
        words = f"Ended early, after {done:,}{wanted} steps; no reason was recorded, so an error is likely"
    else:
        words, good = f"Finished: {done:,}{wanted} steps", True
    took = number(files.summary.get("seconds"))
    took_words = f" · {wording.seconds(took)} in all" if took is not None else ""
    return (
        f'<p class="sub"><span class="status{"" if good else " warn"}">{safe(words)}</span>'
        f"{took_words} · {safe(files.folder.resolve())}</p>"
    )


def missing(files: RunFiles) -> str:
    """What could not be read, if anything."""
    if not files.missing:
        return ""
    entries = "".join(f"<li>{safe(sentence)}</li>" for sentence in files.missing)
    return f'<div class="missing"><b>Not everything is here.</b><ul>{entries}</ul></div>'


def headline(files: RunFiles) -> str:
    """The row of numbers."""
    steps = files.steps
    steady = facts.steady(steps)
    losses, evaluations = _losses(files), _evaluations(files)
    peak, budget = peak_bytes(files), budget_bytes(files)
    read = facts.median(steady, facts.of("ssd_read_bytes"))
    written = facts.median(steady, facts.of("ssd_write_bytes"))
    skipped = sum(1 for step in steps if step.get("skipped"))
    seen = sum(value for _, value in facts.series(steps, facts.of("tokens")))
    rate = facts.median(steady, facts.of("tokens_per_second"))
    tiles = [
        ("steps", f"{_steps_done(files):,}", f"{seen:,.0f} tokens" if seen else "tokens not measured"),
        ("last loss", known(_last(losses), wording.loss), _from(losses)),
        ("last held-out loss", known(_last(evaluations), wording.loss), _from(evaluations)),
        *_perplexity_tile(evaluations),
        ("tokens/s", known(rate, wording.tokens), "median"),
        ("time of a step", known(facts.median(steady, facts.of("seconds")), wording.seconds), "median"),
        (
            "host memory",
            known(peak, wording.memory),
            "peak; " + _of_budget(peak, budget),
        ),
        (
            "SSD, each step",
            known(read + written if read is not None and written is not None else None, wording.moved),
            f"{known(read, wording.moved)} read, {known(written, wording.moved)} written",
        ),
    ]
    if skipped:
        tiles.append(("skipped steps", f"{skipped:,}", "they changed nothing"))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><span>{name}</span><b class="{"none" if value == wording.NOT_MEASURED else "known"}">'
            f"{safe(value)}</b><span>{safe(note)}</span></div>"
            for name, value, note in tiles
        )
        + "</div>"
    )


def cards(files: RunFiles) -> list[str]:
    """Everything below the headline, each part a card."""
    return [
        card("Loss", _loss_chart(files), wide=True),
        card("What limits the run", bottleneck_words(files) + _busy_chart(files), wide=True),
        timeline_card(files),
        step_memory_card(files),
        kinds_card(files),
        rates_card(files),
        card("Tokens per second", _chart(files, "tokens_per_second", "rate", wording.tokens, from_zero=True)),
        card("Host memory", memory_chart(files)),
        card("Gradient norm", _chart(files, "grad_norm", "norm", wording.general, log=True) + _clipped(files)),
        card("Learning rate", _chart(files, "lr", "training", wording.general, from_zero=True)),
        _plan_card(files),
        predicted_card(files),
        memory_card(files),
        _settings_card(files),
    ]


def _steps_done(files: RunFiles) -> int:
    """The number of the last step."""
    if files.steps:
        return int(files.steps[-1]["step"])
    return int(number(files.summary.get("steps")) or 0)


def _steps_planned(files: RunFiles) -> float | None:
    """Steps of the whole run; of one whose length is given in epochs or tokens, as the run worked them out."""
    given = number(mapping(files.config.get("training")).get("steps"))
    return number(files.plan.get("steps")) if given is None else given


def _losses(files: RunFiles) -> list[tuple[int, float]]:
    done = [step for step in files.steps if not step.get("skipped")]
    losses = facts.series(done, facts.of("loss"))
    if losses:
        return losses
    last = number(files.summary.get("last_loss"))
    return [] if last is None else [(_steps_done(files), last)]


def _evaluations(files: RunFiles) -> list[tuple[int, float]]:
    """Held-out losses by step; the one before the first step is in the summary alone."""
    found = facts.series(files.steps, facts.of("eval_loss"))
    first, last = (number(files.summary.get(name)) for name in ("first_eval_loss", "last_eval_loss"))
    if first is not None and files.steps and files.steps[0]["step"] == 1:
        found = [(0, first), *found]
    return found or ([] if last is None else [(_steps_done(files), last)])


def _last(points: Sequence[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None


def _perplexity_tile(evaluations: Sequence[tuple[int, float]]) -> list[tuple[str, str, str]]:
    """Perplexity of the lowest held-out loss of the training, if there is one."""
    best = best_evaluation(evaluations)
    if best is None or math.isinf(perplexity(best[1])):
        return []
    return [("lowest held-out perplexity", wording.general(perplexity(best[1])), f"after step {best[0]:,}")]


def _from(points: Sequence[tuple[int, float]]) -> str:
    return f"from {wording.loss(points[0][1])} at step {points[0][0]:,}" if len(points) > 1 else ""


def _of_budget(peak: float | None, budget: float | None) -> str:
    if not budget:
        return "budget not known"
    share = "" if peak is None else f"{wording.percent(peak / budget)} of "
    return f"{share}{wording.memory(budget)} budget"


def _loss_chart(files: RunFiles) -> str:
    losses, evaluations = _losses(files), _evaluations(files)
    lines = [Series(name="training", color="training", points=losses)]
    if len(losses) > 20:
        lines = [
            Series(name="training, each step", color="training", points=losses, look="faint"),
            Series(name="training, smoothed", color="training", points=facts.smoothed(losses)),
        ]
    marks = [(step["step"], str(step["skipped"])) for step in files.steps if step.get("skipped")]
    return line_chart(
        [*lines, Series(name="held-out text", color="heldout", points=evaluations, look="points")],
        wording.loss,
        label="training and held-out loss over steps",
        width=1140,
        height=300,
        marks=marks[:200],
        write_tick=wording.short_loss,
    )


def _chart(
    files: RunFiles,
    name: str,
    color: str,
    write: Callable[[float], str],
    *,
    from_zero: bool = False,
    log: bool = False,
) -> str:
    points = facts.series(files.steps, facts.of(name))
    label = f"{name.replace('_', ' ')} over steps"
    series = [Series(name=name.replace("_", " "), color=color, points=points)]
    return line_chart(series, write, label=label, from_zero=from_zero, log=log)


def _clipped(files: RunFiles) -> str:
    clipped = [step["clipped"] for step in files.steps if isinstance(step.get("clipped"), bool)]
    limit = number(mapping(files.config.get("optimizer")).get("max_grad_norm"))
    if not clipped or limit is None:
        return ""
    share = wording.percent(sum(clipped) / len(clipped))
    return (
        f'<p class="soft">Limited to {wording.general(limit)}: this clipped the gradient in {safe(share)} of steps.</p>'
    )


def _busy_chart(files: RunFiles) -> str:
    rows, idle, medians = [], [], facts.median_shares(files.steps)
    for resource in RESOURCES:
        points = facts.series(files.steps, facts.busy(resource))
        words = resource_words(resource)
        if any(value > 0 for _, value in points):
            rows.append((Series(name=words, color=f"r-{resource}", points=points), medians.get(resource, 0.0)))
        elif points:
            idle.append(words)
    unused = f'<p class="soft">Never busy: {safe(", ".join(idle))}.</p>' if idle and rows else ""
    return (
        "<h3>Busy share of each resource, step by step (at the right, the median after the first)</h3>"
        + share_rows(rows, label="busy share of each resource over steps")
        + unused
    )


def _plan_card(files: RunFiles) -> str:
    plan = files.plan
    if not plan:
        return card("The plan", '<p class="none">plan.json is missing or empty</p>')
    reasons = plan.get("reasons")
    entries = "".join(f"<li>{safe(reason)}</li>" for reason in reasons) if isinstance(reasons, list) else ""
    batch, choices, ssd = (mapping(plan.get(name)) for name in ("batch", "choices", "ssd"))
    rows = []
    if "schedule" in plan:
        order = ", micro-batches back and forth" if choices.get("snake") else ""
        rows.append(("schedule", f"{plan['schedule']}{order}"))
    if "units" in plan:
        rows.append(("units", plan["units"]))
    if {"micro_batches", "rows", "tokens"} <= batch.keys():
        rows.append(("a step", f"{batch['micro_batches']} micro-batches of {batch['rows']} × {batch['tokens']} tokens"))
    trained, parameters = (number(files.summary.get(name)) for name in ("trained_parameters", "parameters"))
    if trained is not None and parameters is not None and trained < parameters:
        rows.append(("parameters trained", f"{trained:,.0f} of {parameters:,.0f}"))
    share = number(plan.get("delayed_parameters_share", choices.get("delayed_share")))
    if share is not None:
        rows.append(("parameters updated in the next step's forward", wording.percent(share)))
    kept = number(choices.get("kept_activations"))
    if kept:
        rows.append(("activations kept for the backward, not recomputed", wording.percent(kept)))
    if "gradients" in choices:
        rows.append(("gradients are kept in", _TIERS.get(str(choices["gradients"]), choices["gradients"])))
    for name, words in (
        ("weights_and_state_bytes", "weights and state on SSD"),
        ("frozen_bytes", "weights that are not trained, on SSD"),
        ("gradient_bytes", "gradients on SSD"),
        ("boundary_bytes", "boundaries on SSD"),
    ):
        if (size := number(ssd.get(name))) is not None and size:
            rows.append((words, wording.moved(size)))
    for name, direction in (("read_bytes_per_step", "read"), ("write_bytes_per_step", "written")):
        if (size := number(ssd.get(name))) is not None:
            rows.append((f"planned to be {direction} in a step", wording.moved(size)))
    table = "".join(f'<tr><td>{safe(name)}</td><td class="n">{safe(value)}</td></tr>' for name, value in rows)
    return card("The plan, and why", f"<ul>{entries}</ul><table>{table}</table>" if rows else f"<ul>{entries}</ul>")


def _settings_card(files: RunFiles) -> str:
    if not files.config_text:
        return ""
    return (
        f'<section class="card wide"><details><summary>The run\'s settings (config.yaml)</summary>'
        f"<pre>{safe(files.config_text)}</pre></details></section>"
    )
