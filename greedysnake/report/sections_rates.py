"""The part of a report page about rates: those reached, while busy and over a step, beside a probe's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from greedysnake.report import facts, wording
from greedysnake.report.cards import card
from greedysnake.report.events import OperationEvent
from greedysnake.report.run_files import HARDWARE, RunFiles, TracedStep, mapping, number
from greedysnake.report.wording import known, safe


@dataclass(frozen=True, kw_only=True)
class _Rate:
    """What a resource did in a step; None is not known.

    Attributes:
        words: the resource.
        amount: bytes moved or parameters updated.
        while_busy: amount per second in which the resource was busy.
        over_step: amount per second of the step.
        busy: share of the step.
        probed: amount per second that a probe of the machine reached.
        write_amount, write_rate: how the amount and the rates are written.
    """

    words: str
    amount: float | None
    while_busy: float | None
    over_step: float | None
    busy: float | None
    probed: float | None
    write_amount: Callable[[float], str] = wording.moved
    write_rate: Callable[[float], str] = wording.rate


_TRACED = (
    ("SSD read", ("ssd_read",), "disk.read_bytes_per_s"),
    ("SSD write", ("ssd_write",), "disk.write_bytes_per_s"),
    ("SSD, both together", ("ssd_read", "ssd_write"), "disk.mixed_bytes_per_s"),
    ("host → device", ("h2d",), "h2d_bytes_per_s"),
    ("device → host", ("d2h",), "d2h_bytes_per_s"),
)
"""What moves bytes, on which resources, and where a probe has its rate."""
_OPTIMIZER_PROBE = "optimizer_parameters_per_s"


def rates_card(files: RunFiles) -> str:
    """Rates of the SSDs, the buses and the optimizer, and the part that they are of the probe's."""
    steady = facts.steady(files.steps)
    title = f"median of {len(steady):,} steps" if len(steady) > 1 else "the only step" if steady else "no steps"
    tables = [(title, _median_rates(steady, files.hardware))]
    if files.traced is not None:
        tables.append((f"step {files.traced.number:,}, as traced", _traced_rates(files.traced, files.hardware)))
    probed = any(rate.probed for _, rates in tables for rate in rates)
    body = "".join(_table(title, rates, probed=probed) for title, rates in tables)
    note = "" if probed else f'<p class="soft">{safe(_why_not_probed(files))}</p>'
    return card("Rates reached", f'<div class="scroll"><table>{body}</table></div>{note}', wide=True)


def _why_not_probed(files: RunFiles) -> str:
    if files.hardware:
        return f"{HARDWARE} has no rate of these, so there is nothing to compare them with."
    return "No probe of this machine was made, so there is nothing to compare these with."


def probed_rate(hardware: Mapping[str, Any], path: str) -> float | None:
    """A rate that a probe measured, such as ``disk.read_bytes_per_s``; None if it is not there or not above 0."""
    value: Any = hardware
    for name in path.split("."):
        value = mapping(value).get(name)
    found = number(value)
    return found if found is not None and found > 0 else None


def _median_rates(steady: Sequence[facts.Step], hardware: Mapping[str, Any]) -> list[_Rate]:
    return [
        _Rate(
            words=words,
            amount=facts.median(steady, facts.of(f"{name}_bytes")),
            while_busy=facts.median(steady, facts.busy_rate(name)),
            over_step=facts.median(steady, facts.step_rate(name)),
            busy=facts.median(steady, facts.busy(name)),
            probed=probed_rate(hardware, path),
        )
        for words, (name, *others), path in _TRACED
        if name.startswith("ssd_") and not others
    ]


def _traced_rates(traced: TracedStep, hardware: Mapping[str, Any]) -> list[_Rate]:
    rates = []
    for words, resources, path in _TRACED:
        events = [event for event in traced.events if event.resource in resources]
        moved = sum(event.bytes for event in events)
        if moved:
            rates.append(_traced_rate(traced, words, events, moved, probed_rate(hardware, path)))
    updates = [event for event in traced.events if event.parameters]
    if updates:
        updated, probed = sum(event.parameters for event in updates), probed_rate(hardware, _OPTIMIZER_PROBE)
        rate = _traced_rate(traced, "optimizer, on the CPU", updates, updated, probed)
        rates.append(replace(rate, write_amount=wording.parameters, write_rate=wording.parameter_rate))
    return rates


def _traced_rate(
    traced: TracedStep, words: str, events: Sequence[OperationEvent], amount: int, probed: float | None
) -> _Rate:
    whole, busy = facts.step_seconds(traced), facts.covered_seconds(events)
    return _Rate(
        words=words,
        amount=amount,
        while_busy=amount / busy if busy else None,
        over_step=amount / whole if whole else None,
        busy=busy / whole if whole else None,
        probed=probed,
    )


def _table(title: str, rates: Sequence[_Rate], *, probed: bool) -> str:
    of_probe = '<th class="n">the probe\'s rate</th><th class="n">reached of it</th>' if probed else ""
    return (
        f'<tr><th>{safe(title)}</th><th class="n">amount</th><th class="n">rate while busy</th>'
        f'<th class="n">rate over the whole step</th><th class="n">busy</th>{of_probe}</tr>'
        + "".join(_row(rate, probed=probed) for rate in rates)
    )


def _row(rate: _Rate, *, probed: bool) -> str:
    nothing = rate.amount == 0  # and so no rate
    cells = [
        known(rate.amount, rate.write_amount),
        "–" if nothing else known(rate.while_busy, rate.write_rate),
        "–" if nothing else known(rate.over_step, rate.write_rate),
        known(rate.busy, wording.percent),
    ]
    if probed and rate.probed is not None:
        share = None if rate.while_busy is None else rate.while_busy / rate.probed
        cells += [rate.write_rate(rate.probed), "–" if share is None else wording.percent(share)]
    elif probed:
        cells += ["–", "–"]
    amount, while_busy, *rest = map(safe, cells)
    return "".join(
        [
            f'<tr><td>{safe(rate.words)}</td><td class="n">{amount}</td><td class="n"><b>{while_busy}</b></td>',
            *(f'<td class="n">{cell}</td>' for cell in rest),
            "</tr>",
        ]
    )
