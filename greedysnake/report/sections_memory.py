"""The parts of a report page about memory: over a step, over the run, and by purpose."""

from greedysnake.report import facts, wording
from greedysnake.report.areas import Layer, Level, stacked_areas
from greedysnake.report.cards import card
from greedysnake.report.charts import Series, line_chart
from greedysnake.report.memory import TIER_WORDS, TierMemory, pool_group
from greedysnake.report.run_files import RunFiles, TracedStep, mapping, number
from greedysnake.report.wording import known, safe
from greedysnake.schedule import Tier

_PURPOSES = {
    "process": "Python and its libraries, before the run",
    "computation": "what computation takes inside of a unit",
    "master_weights": "float32 weights of the chunk that is updated",
    "weights": "weights of units in use and on their way",
    "device_weights": "weights of units in use",
    "gradient": "gradients of units in work",
    "device_gradient": "gradients of units in work",
    "tied_gradient": "the head's part of the embedding's gradient",
    "state": "optimizer state of chunks on their way",
    "gradient_chunk": "gradients of chunks on their way from SSD",
    "norm": "the gradient's norm",
    "activation": "boundaries between units",
    "boundary": "boundaries that left, or are on their way",
    "boundary_gradient": "gradients of boundaries",
    "kept_activation": "activations that are not recomputed",
    "held": "gradients that wait for their update",
    "resident_weights": "weights that stay in memory",
    "resident_state": "optimizer state that stays in memory",
}
_GROUPS = {
    "resident": "weights and state that stay",
    "waiting gradients": "gradients that wait for their update",
    "boundaries": "boundaries between units",
    "kept": "activations that are not recomputed",
    "weights": "weights",
    "gradients": "gradients in work",
    "state": "optimizer state on its way",
    "other": "other",
}
_OUTSIDE = {
    "process": "Python and its libraries",
    "computation": "what computation takes inside of a unit",
    "master_weights": "float32 weights of a chunk",
}
_BUDGET_IN_SIGHT = 2.5  # times what is drawn; a line further up would press the picture flat


def peak_bytes(files: RunFiles) -> float | None:
    """The most memory that the process has had."""
    peak = facts.highest(files.steps, "host_peak_bytes")
    return peak if peak is not None else number(files.summary.get("host_peak_bytes"))


def budget_bytes(files: RunFiles, tier: Tier = Tier.HOST) -> float | None:
    """What the run may use of a tier; None if that is not known."""
    return number(mapping(files.plan.get(f"{tier}_memory")).get("budget_bytes"))


def _purposes(files: RunFiles, tier: Tier = Tier.HOST) -> dict[str, float]:
    """What the plan expects a tier to hold, by purpose."""
    expected = mapping(mapping(files.plan.get(f"{tier}_memory")).get("by_purpose"))
    return {name: size for name, value in expected.items() if (size := number(value)) is not None}


def step_memory_card(files: RunFiles) -> str:
    """What each tier held over the last traced step."""
    traced = files.traced
    if traced is None or not traced.memory:
        return card("Memory over a step", f'<p class="none">{_why_none(traced)}</p>', wide=True)
    reading = (
        "Each colour is memory that holds something just then, from below in the order of the list; from there to the "
        "dashed line memory is reserved, too, but holds nothing at that moment."
    )
    tiers = "".join(_tier(files, memory) for memory in traced.memory)
    return card(f"Memory over step {traced.number:,}", f"<p>{reading}</p>{tiers}", wide=True)


def _why_none(traced: TracedStep | None) -> str:
    return "No step was traced." if traced is None else "The trace does not tell what memory held."


def _tier(files: RunFiles, memory: TierMemory) -> str:
    """A tier's heading and chart."""
    peak, reserved = max(memory.total_bytes()), memory.reserved_bytes
    words = TIER_WORDS[memory.tier]
    levels = [Level(value=reserved, name=f"reserved, {wording.memory(reserved)}", look="reserved")]
    outside = {name: size for name, size in _purposes(files, memory.tier).items() if pool_group(name) is None}
    left = budget_bytes(files, memory.tier)
    notes = []
    if left is not None:
        left -= sum(outside.values())
        share = f"what the budget leaves for these, {wording.memory(left)}"
        if 0 < left <= _BUDGET_IN_SIGHT * max(peak, reserved):
            levels.append(Level(value=left, name=share, look="limit"))
        elif left > 0:
            notes.append(f"The budget leaves {wording.memory(left)} for these, far above this picture.")
    if outside:
        names = ", ".join(_OUTSIDE.get(name, name.replace("_", " ")) for name in outside)
        notes.append(f"Not in it, about {wording.memory(sum(outside.values()))}: {names}.")
    layers = [
        Layer(name=_peak_words(group, values), color=f"m-{group.replace(' ', '-')}", values=values)
        for group, values in memory.live_bytes.items()
    ]
    return (
        f"<h3>{safe(words[:1].upper() + words[1:])}: at most {wording.memory(peak)} of {wording.memory(reserved)} "
        "reserved</h3>"
        + stacked_areas(
            layers,
            memory.times_s,
            wording.memory,
            label=f"{words} over a step",
            levels=levels,
            tick_unit=_tick_unit(max(level.value for level in levels)),
        )
        + (f'<p class="soft">{safe(" ".join(notes))}</p>' if notes else "")
    )


def _peak_words(group: str, values: tuple[int, ...]) -> str:
    return f"{_GROUPS.get(group, group)}, at most {wording.memory(max(values, default=0))}"


def _tick_unit(highest: float) -> float:
    return next((unit for unit in (2.0**30, 2.0**20, 2.0**10) if highest >= unit), 1.0)


def memory_chart(files: RunFiles) -> str:
    """The process's memory, step by step."""
    points, budget = facts.series(files.steps, facts.of("host_peak_bytes")), budget_bytes(files)
    highest = max((value for _, value in points), default=0.0)
    note, limit = "", None
    if budget is not None and points and budget > _BUDGET_IN_SIGHT * highest:
        note = f'<p class="soft">The budget, {safe(wording.memory(budget))}, is far above.</p>'
    elif budget is not None:
        highest, limit = max(highest, budget), (budget, f"budget {wording.memory(budget)}")
    return (
        line_chart(
            [Series(name="highest so far", color="memory", points=points)],
            wording.memory,
            label="host memory over steps",
            from_zero=True,
            limit=limit,
            tick_unit=_tick_unit(highest),
        )
        + note
    )


def memory_card(files: RunFiles) -> str:
    """What the plan expects host memory to be taken by, and what was measured."""
    purposes = _purposes(files)
    if not purposes:
        return card("Host memory by purpose", '<p class="none">plan.json does not say it</p>')
    expected, most = sum(purposes.values()), max(purposes.values())
    rows = "".join(
        f'<tr><td>{safe(_PURPOSES.get(name, name.replace("_", " ")))}</td><td class="n">{wording.memory(size)}</td>'
        f'<td class="bar-cell"><div style="--c:var(--memory);width:{size * 100 / (most or 1):.1f}%"></div></td></tr>'
        for name, size in sorted(purposes.items(), key=lambda item: -item[1])
    )
    peak, budget = peak_bytes(files), budget_bytes(files)
    summary = (
        f"Expected {wording.memory(expected)}, measured at most {known(peak, wording.memory)}"
        f"{f', budget {wording.memory(budget)}' if budget is not None else ''}."
    )
    return card("Host memory by purpose", f"<p>{safe(summary)}</p><table>{rows}</table>")
