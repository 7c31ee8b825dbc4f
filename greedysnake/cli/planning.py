"""What ``greedysnake plan`` and ``greedysnake simulate`` do: a question, and its answer in words."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from greedysnake import units
from greedysnake.config import PROBED, RunConfig, load_config, named_hardware
from greedysnake.errors import ConfigError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.forecast import CHINCHILLA_TOKENS, SHOWN_RESOURCES, Forecast, forecast, where
from greedysnake.plan.hardware import Hardware, load_hardware, profile_names
from greedysnake.plan.presets import MODEL_PRESETS
from greedysnake.plan.query import Case, PlanQuery
from greedysnake.plan.roofline import roofline_points
from greedysnake.plan.snapshots import DEFAULT_SNAPSHOT_STEPS
from greedysnake.report import wording
from greedysnake.report.wording import moved, percent, rate, seconds
from greedysnake.schedule import Choices, Tier
from greedysnake.units import format_bytes

DEFAULT_MACHINE = "a100-40gb"
"""For a preset, whose published figures are of such a machine."""


def parse_count(text: str) -> float:
    """A number of tokens: ``20B`` is 20 billion.

    Raises:
        ConfigError: it is not a number above 0.
    """
    try:
        count = units.parse_count(text)
    except ValueError:
        count = 0
    if not 0 < count < 1e18:
        raise ConfigError(f"tokens: found {text!r}; needs a number above 0, such as 20B, 500M or 3e9")
    return float(count)


def make_query(model: str, machine: str | None, fixed: dict[str, Any], overrides: Sequence[str]) -> PlanQuery:
    """The question: a preset, or the settings of a run.

    Args:
        model: name of a preset, or a YAML file of settings.
        machine: file of its figures or name of a profile; None: the one of the settings, or for a preset
            DEFAULT_MACHINE.
        fixed: fields of the query given on the command line; None leaves a field as the settings have it.
        overrides: ``key=value`` for a file of settings.

    Raises:
        ConfigError: the model, the settings or their combination cannot be used.
    """
    given = {name: value for name, value in fixed.items() if value is not None}
    if model in MODEL_PRESETS:
        if overrides:
            raise ConfigError(f"{overrides[0]}: only a file of settings can be changed so, not the preset {model}")
        preset = MODEL_PRESETS[model]
        query = PlanQuery(
            workload=preset.workload(),
            hardware=load_hardware(machine or DEFAULT_MACHINE),
            tokens=preset.tokens,
            clipping=False,
            snapshot_every=DEFAULT_SNAPSHOT_STEPS,
        )
        return replace(query, **given)
    path = Path(model)
    if not path.exists():
        known = ", ".join(MODEL_PRESETS)
        raise ConfigError(f"{model}: neither a file of settings nor a known model; known are {known}")
    settings = load_config(path, overrides)
    named = machine or named_hardware(settings.engine.hardware)
    if named is None:
        raise ConfigError(
            f"--hardware: missing, {model} names no engine.hardware, and there is no {PROBED} here; needs a file that "
            f"greedysnake probe --storage FOLDER wrote on the machine, or one of {', '.join(profile_names())}"
        )
    query = _query_of(settings, load_hardware(named))
    if "sequences" in given:
        query = replace(query, micro_batches=None, rows=None)
    elif {"micro_batches", "rows"} & given.keys():
        query = replace(query, sequences=None)
    return replace(query, **given)


def _query_of(settings: RunConfig, hardware: Hardware) -> PlanQuery:
    """What a run with these settings would ask on a machine, which need not be this one."""
    # here, as a preset needs neither torch nor transformers
    from greedysnake.cli.model import lora_of, model_config
    from greedysnake.cli.trainer import changeable_settings
    from greedysnake.engine.settings import TrainerSettings
    from greedysnake.plan.describe import describe_model

    engine, training = settings.engine, settings.training
    if engine.boundaries_on_device and not hardware.separate_device:
        raise ConfigError(
            f"engine.boundaries_on_device: found {engine.boundaries_on_device:g}; needs 0 or null, as {hardware.name} "
            f"has no accelerator with memory of its own. Or name another machine with --hardware"
        )
    config = model_config(settings)
    workload = describe_model(
        config,
        dtype=settings.model.dtype,
        name=str(settings.model.path or config.model_type),
        split_master=engine.split_master,
        freeze=training.freeze or (),
        lora=lora_of(settings),
    )
    there = {"hardware": hardware, "device": "emulated" if hardware.separate_device else "cpu"}
    trainer = TrainerSettings.of(
        storage=tuple(settings.storage_folders),
        layers_per_unit=engine.layers_per_unit,
        second_slot=engine.second_slot,
        **{**changeable_settings(settings), **there},
    )
    query = trainer.request(separate_device=hardware.separate_device, device_free_bytes=None).query(
        workload,
        _within(hardware, engine.host_memory, engine.device_memory),
        BatchShape(
            micro_batches=training.micro_batches, rows=training.micro_batch_size, tokens=settings.data.sequence_length
        ),
    )
    return replace(query, second_slot=engine.second_slot)


def _within(hardware: Hardware, host_memory: int | None, device_memory: int | None) -> Hardware:
    """The machine with no more memory than the run's settings allow."""
    changes: dict[str, int] = {}
    if host_memory is not None:
        changes["host_memory"] = min(host_memory, hardware.host_memory)
    if device_memory is not None and hardware.device_memory is not None:
        changes["device_memory"] = min(device_memory, hardware.device_memory)
    return hardware.model_copy(update=changes)


def run_plan(
    model: str,
    *,
    machine: str | None,
    fixed: dict[str, Any],
    overrides: Sequence[str],
    picture: Path | None,
    watts: float | None = None,
) -> Forecast:
    """Answer the question, and draw the roofline if a path is given.

    Args:
        model, machine, fixed, overrides: as :func:`make_query` takes them.
        picture: of the roofline.
        watts: power of the whole machine while it trains; None: as its figures say, if they do.

    Raises:
        GreedySnakeError: it has no answer; the message says why.
    """
    query = make_query(model, machine, fixed, overrides)
    if query.schedule != "vertical":
        raise ConfigError(
            f"engine.schedule: found {query.schedule}; the planner places vertical steps only. greedysnake simulate "
            f"shows what a horizontal one would take"
        )
    if watts is not None:
        if not 0 < watts < math.inf:
            raise ConfigError(f"--watts: found {watts:g}; needs a number above 0")
        query = replace(query, hardware=query.hardware.model_copy(update={"watts": watts}))
    found = forecast(query)
    if picture is not None:
        from greedysnake.plan.pictures import draw_roofline  # here, as matplotlib takes long to load

        found = replace(found, points=tuple(roofline_points(query, found.candidate.case.batch.rows)))
        draw_roofline(query, found.points, picture)
    return found


def print_forecast(found: Forecast, console: Console, tokens: float | None) -> None:
    """Say what will happen."""
    query, case, step = found.query, found.candidate.case, found.candidate.step
    machine, batch, choices = query.hardware, case.batch, case.choices
    copies = (
        f", copies {percent(found.busy['h2d'])} and {percent(found.busy['d2h'])}" if machine.separate_device else ""
    )
    basis = "this model's own layers, measured" if found.measured else "rates of the profile, not this model's layers"
    lines = [
        f"[bold]{escape(query.workload.name)}[/] ({query.workload.parameters / 1e9:.3g} B parameters, "
        f"{query.workload.dtype}) on [bold]{escape(machine.name)}[/]: predicted, nothing was run",
        "",
        f"[bold]{wording.tokens(found.candidate.tokens_per_second)} tokens/s[/], {seconds(step.seconds)} a step of "
        f"{found.tokens_per_step:,} tokens: {batch.micro_batches} micro-batches of {batch.rows} x {batch.tokens}",
        f"limited by {SHOWN_RESOURCES[found.bottleneck]} (busy {percent(found.busy[found.bottleneck])}); "
        f"no order of this work could take less than {seconds(found.candidate.least_seconds)}",
        f"busy: computation {percent(found.busy['compute'])}, disks {percent(found.busy['disk'])}, "
        f"host {percent(found.busy['cpu'])}{copies}",
        f"from SSD {moved(step.ssd_read_bytes)} and to it {moved(step.ssd_written_bytes)} a step, "
        f"{rate(step.ssd_read_bytes / step.seconds)} and {rate(step.ssd_written_bytes / step.seconds)}",
        "",
        "[bold]Where things go[/]",
        f"  micro-batches      {_groups(case)}",
        f"  optimizer steps    {percent(choices.delayed_share)} delayed into the next forward"
        + (", the rest after the backward, when the norm is known" if choices.wait_for_norm else ""),
        f"  weights            {percent(choices.resident_weights)} stay in host memory",
        f"  optimizer state    {percent(choices.resident_state)} stays in host memory",
        f"  boundaries         {_boundaries(choices)}",
        f"  activations        {percent(choices.kept_activations)} kept for the backward, the rest recomputed",
        f"  waiting gradients  {where(choices.gradients)}",
        f"  unit               {case.layers_per_unit} decoder layer{'s'[: case.layers_per_unit > 1]}",
        "",
        "[bold]What it needs[/]",
    ]
    limits = {Tier.HOST: query.limits.host, Tier.DEVICE: query.limits.device, Tier.SSD: query.limits.disk}
    for tier in (Tier.HOST, Tier.DEVICE, Tier.SSD):
        purposes = found.needs.purposes(tier)
        if not purposes:
            continue
        largest = sorted(purposes, key=lambda name: purposes[name], reverse=True)[:4]
        parts = ", ".join(f"{name} {format_bytes(purposes[name])}" for name in largest)
        name = "disk" if tier == Tier.SSD else where(tier)
        lines.append(
            f"  {name:<18} {format_bytes(found.needs.total(tier))} of {format_bytes(limits[tier] or 0)} ({parts})"
        )
    if found.helps:
        lines += ["", "[bold]What would help[/]"]
        lines += [f"  {help_.change}: {help_.speedup:.2f} times as fast" for help_ in found.helps]
    lines += ["", *_budget_lines(found, tokens)]
    lines.append(f"Computation: {basis}. The machine's figures:")
    lines += [f"  {escape(figure)}: {escape(source)}" for figure, source in machine.sources.items()]
    console.print("\n".join(lines))


def _groups(case: Case) -> str:
    """How many micro-batches go through the layers together."""
    count, size = case.batch.micro_batches, case.choices.group_size
    if size is None or size >= count:
        return "all go through a layer together"
    return f"in groups of {size} of the {count}, each forward and backward before the next"


def _boundaries(choices: Choices) -> str:
    """Where boundaries wait for the backward."""
    shares = {
        Tier.DEVICE: choices.boundaries_on_device,
        Tier.HOST: 1 - choices.boundaries_on_device - choices.boundaries_on_ssd,
        Tier.SSD: choices.boundaries_on_ssd,
    }
    return ", ".join(f"{percent(share)} in {where(tier)}" for tier, share in shares.items() if share > 1e-6)


def _count(tokens: float) -> str:
    for suffix, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if tokens >= factor:
            return f"{tokens / factor:.3g} {suffix}"
    return f"{tokens:,.0f}"


def _budget_lines(found: Forecast, tokens: float | None) -> list[str]:
    """Days, energy and wear for a budget, or for what the model's size suggests."""
    wanted = tokens or found.best_tokens
    if wanted is None:
        return ["How many days that is depends on the tokens to train on: --tokens 20M"]
    budget = found.budget(wanted)
    lines = [
        f"[bold]{_count(budget.tokens)} tokens[/]: {budget.steps:,.0f} steps, [bold]{budget.days:,.1f} days[/]"
        + ("" if budget.kilowatt_hours is None else f", {budget.kilowatt_hours:,.0f} kWh")
        + f", {moved(budget.written_bytes)} written"
        + ("" if budget.endurance_share is None else f" ({percent(budget.endurance_share)} of the disks' endurance)")
    ]
    if tokens is None:
        lines[0] += f"; that many are {CHINCHILLA_TOKENS} a parameter (Chinchilla), choose with --tokens"
    elif budget.best_tokens is not None:
        lines.append(
            f"that is {budget.tokens_per_parameter:.3g} tokens a parameter; about {CHINCHILLA_TOKENS} make the best of "
            f"a budget of computation (Chinchilla)"
        )
    return lines
