"""The parts of a report page about time: the bottleneck in words, the timeline, operations by kind, and rates."""

from greedysnake.report import facts, timeline, wording
from greedysnake.report.bars import bars_of
from greedysnake.report.events import OperationEvent, operation_name, resource_words
from greedysnake.report.run_files import RunFiles, TracedStep
from greedysnake.report.wording import safe

_BUSY = 0.6  # below, no resource limits a step by itself
_ZOOMS = (1, 2, 4, 8, 16)


def bottleneck_words(files: RunFiles) -> str:
    """Which resource is busiest, how far a step is from it alone, and what it waits for."""
    found = facts.bottleneck(files.steps)
    if found is None:
        return '<p class="none">Busy shares were not measured.</p>'
    words, step, alone = resource_words(found.resource), wording.seconds(found.step_s), wording.seconds(found.alone_s)
    name = words if words[:1].isupper() else words.capitalize()
    ratio = found.step_s / found.alone_s
    busy = f"is busy {wording.percent(found.share)} of a step"
    distance = f"a step takes {step}, {ratio:.2f}× the {alone} that {words} alone would take"
    if found.share >= _BUSY:
        lead = f"<b>{safe(name)} limits this run.</b> It {safe(busy)}: {safe(distance)}."
    else:
        lead = (
            f"<b>No resource limits this run by itself; they wait for each other.</b> "
            f"The busiest, {safe(words)}, {safe(busy)}: {safe(distance)}."
        )
    others = [
        f"{resource_words(resource)} {wording.percent(share)}"
        for resource, share in facts.median_shares(files.steps).items()
        if resource != found.resource and share > 0
    ]
    also = f"<p>The others: {safe(', '.join(others))}.</p>" if others else ""
    return f'<p class="lead">{lead}</p>{also}'


def timeline_card(files: RunFiles) -> str:
    """The last traced step, operation by operation."""
    traced = files.traced
    if traced is None:
        body = '<p class="none">No step was traced.</p>'
        return f'<section class="card wide"><h2>Timeline of the last step</h2>{body}</section>'
    buttons = " ".join(
        f'<button type="button" value="{zoom}" aria-pressed="{"true" if zoom == 1 else "false"}">{zoom}×</button>'
        for zoom in _ZOOMS
    )
    return (
        f'<section class="card wide"><div class="zoom">{buttons}</div>'
        f"<h2>Timeline of step {traced.number:,}</h2>"
        f'<p class="legend">{timeline.legend(traced)}<span>two shades: every other unit · numbers: layers, '
        f"letters: other units</span></p>"
        f"{timeline.timeline(traced)}{_waits(files, traced)}"
        f'<p class="soft">trace.json shows this and further steps in ui.perfetto.dev.</p></section>'
    )


def _waits(files: RunFiles, traced: TracedStep) -> str:
    found = facts.bottleneck(files.steps)
    if found is None:
        return ""
    waits = facts.longest_waits(traced, found.resource, 3)
    words = resource_words(found.resource)
    if not waits:
        return f"<p>In this step {safe(words)} never waited for as long as 1% of the step.</p>"
    told = "; ".join(
        f"{wording.seconds(wait.seconds)} "
        + (f"before {operation_name(wait.before, traced.unit_names)}" if wait.before else "at the end of the step")
        for wait in waits
    )
    return f"<p>The longest waits of {safe(words)} in this step: {safe(told)}.</p>"


def kinds_card(files: RunFiles) -> str:
    """A table of the last traced step's operations by resource and kind."""
    traced = files.traced
    if traced is None or not facts.step_seconds(traced) > 0:
        return ""
    whole = facts.step_seconds(traced)
    examples = {(event.resource, event.kind): event for event in traced.events}
    rows, before = [], None
    for time in facts.times_by_kind(traced):
        family, share = _family(examples[time.resource, time.kind]), time.seconds / whole
        amount, rate = _moved_or_updated(time)
        rows.append(
            f"<tr><td>{safe(resource_words(time.resource)) if time.resource != before else ''}</td>"
            f'<td>{safe(time.kind.replace("_", " "))}</td><td class="n">{time.count:,}</td>'
            f'<td class="n">{wording.seconds(time.seconds)}</td><td class="n">{safe(wording.percent(share))}</td>'
            f'<td class="bar-cell share"><div style="--c:var(--{family});width:{share * 100:.1f}%"></div></td>'
            f'<td class="n">{amount}</td><td class="n">{rate}</td></tr>'
        )
        before = time.resource
    return (
        f'<section class="card wide"><h2>Where the time of step {traced.number:,} goes</h2><div class="scroll"><table>'
        '<tr><th>resource</th><th>operation</th><th class="n">number</th><th class="n">busy</th>'
        '<th class="n">of the step</th><th></th><th class="n">amount</th><th class="n">rate while busy</th></tr>'
        f"{''.join(rows)}</table></div></section>"
    )


def _moved_or_updated(time: facts.KindTime) -> tuple[str, str]:
    """How much operations of a kind moved, or how many parameters they updated, and how fast; "" for neither."""
    if time.bytes:
        amount, rate = wording.moved(time.bytes), wording.rate
    elif time.parameters:
        amount, rate = wording.parameters(time.parameters), wording.parameter_rate
    else:
        return "", ""
    return amount, rate((time.bytes or time.parameters) / time.seconds) if time.seconds else ""


def _family(event: OperationEvent) -> str:
    return bars_of([event], 0, 0.0, 1.0)[0].family
