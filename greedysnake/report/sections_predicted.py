"""The part of a report page that sets what the plan predicted beside what was measured."""

import statistics
from collections.abc import Callable

from greedysnake.report import facts, wording
from greedysnake.report.cards import card
from greedysnake.report.run_files import RunFiles, mapping, number
from greedysnake.report.sections_memory import peak_bytes
from greedysnake.report.wording import known, safe

_MEANS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("time of a step", "step_seconds", "seconds", wording.seconds),
    ("read from SSD in a step", "ssd_read_bytes", "ssd_read_bytes", wording.moved),
    ("written to SSD in a step", "ssd_write_bytes", "ssd_write_bytes", wording.moved),
)


def predicted_card(files: RunFiles) -> str:
    """Time, bytes and memory: predicted, measured, and their ratio. Times and bytes are means after the first step."""
    predicted = mapping(files.plan.get("prediction"))
    steady = [step for step in facts.steady(files.steps) if not step.get("skipped")]
    rows = []
    for words, planned, measured, write in _MEANS:
        values = [value for _, value in facts.series(steady, facts.of(measured))]
        rows.append((words, number(predicted.get(planned)), statistics.mean(values) if values else None, write))
    expected = number(mapping(files.plan.get("host_memory")).get("expected_bytes"))
    rows.append(("most host memory", expected, peak_bytes(files), wording.memory))
    shown = [row for row in rows if row[1] is not None]
    if not shown:
        return card("Predicted and measured", '<p class="none">plan.json predicts nothing</p>')
    body = "".join(
        f'<tr><td>{safe(words)}</td><td class="n">{safe(known(planned, write))}</td>'
        f'<td class="n">{safe(known(measured, write))}</td><td class="n">{safe(_ratio(planned, measured))}</td></tr>'
        for words, planned, measured, write in shown
    )
    machine = predicted.get("machine")
    note = (
        f"Predicted from the figures of {machine}."
        if machine
        else "No time was predicted without figures of the machine (engine.hardware). greedysnake probe measures them."
    )
    return card(
        "Predicted and measured",
        '<table><tr><th></th><th class="n">predicted</th><th class="n">measured</th><th class="n">ratio</th></tr>'
        f'{body}</table><p class="soft">{safe(note)}</p>',
    )


def _ratio(planned: float | None, measured: float | None) -> str:
    return f"{measured / planned:.2f}" if planned and measured is not None else "–"
