"""Predicting a run: ``plan``, ``simulate``, and ``probe``, which measures the machine for them."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from greedysnake.cli.commands.options import DelayedShare, GroupSize, Hardware, MicroBatches, MicroBatchSize, Overrides
from greedysnake.plan.collecting import without_collecting

ResidentWeights = Annotated[
    float | None, typer.Option(min=0, max=1, help="Share of all weights that stays in host memory.")
]
ResidentState = Annotated[float | None, typer.Option(min=0, max=1, help="Likewise of the optimizer's state.")]


def plan(
    model: Annotated[
        str, typer.Argument(metavar="CONFIG|PRESET", help="A run's settings (YAML), or gpt-175b and such.")
    ],
    overrides: Overrides = None,
    *,
    hardware: Hardware = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, for days and energy: 20B.")] = None,
    watts: Annotated[
        float | None, typer.Option(help="Power of the whole machine, for energy; default: as its figures say.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Sequences in a step; default: planned.")] = None,
    micro_batches: MicroBatches = None,
    micro_batch_size: MicroBatchSize = None,
    group_size: GroupSize = None,
    delayed_share: DelayedShare = None,
    layers_per_unit: Annotated[int | None, typer.Option(min=1, help="Decoder layers in a unit.")] = None,
    resident_weights: ResidentWeights = None,
    resident_state: ResidentState = None,
    clipping: Annotated[
        bool | None, typer.Option("--clipping/--no-clipping", help="Whether the gradient's norm is limited.")
    ] = None,
    roofline: Annotated[
        Path | None, typer.Option(help="Picture to write: tokens/s against the batch; --json has its points.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON, and nothing else.")] = False,
) -> None:
    """Predict a run before it starts: speed, memory, disk, days, and what limits it."""
    fixed = {
        "sequences": sequences,
        "micro_batches": micro_batches,
        "rows": micro_batch_size,
        "group_size": group_size,
        "delayed_share": delayed_share,
        "layers_per_unit": layers_per_unit,
        "resident_weights": resident_weights,
        "resident_state": resident_state,
        "clipping": clipping,
    }
    with without_collecting():  # from the loading of libraries on
        from greedysnake.cli.planning import parse_count, print_forecast, run_plan

        budget = None if tokens is None else parse_count(tokens)
        found = run_plan(model, machine=hardware, fixed=fixed, overrides=overrides or [], picture=roofline, watts=watts)
    if as_json:
        typer.echo(json.dumps(found.as_json(budget)))
        return
    print_forecast(found, Console(soft_wrap=True, highlight=False), budget)


def simulate(
    model: Annotated[str, typer.Argument(metavar="CONFIG|PRESET", help="A run's settings (YAML), or gpt-175b.")],
    overrides: Overrides = None,
    *,
    hardware: Hardware = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="vertical, horizontal, zero-infinity or zero-offload; default: as the settings say."),
    ] = None,
    micro_batches: MicroBatches = None,
    micro_batch_size: MicroBatchSize = None,
    group_size: GroupSize = None,
    delayed_share: DelayedShare = None,
    resident_weights: ResidentWeights = None,
    resident_state: ResidentState = None,
    whole_master: Annotated[bool, typer.Option("--whole-master", help="Whole masters: 30 B a parameter.")] = False,
    eight_bit_moments: Annotated[
        bool, typer.Option("--eight-bit-moments", help="What this engine does not have: 14 B a parameter.")
    ] = False,
    timeline: Annotated[Path | None, typer.Option(help="Picture to write: the simulated step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Simulate a step with choices made by hand, or in another system's order."""
    from greedysnake.cli.simulating import run_simulation

    fixed = {
        "micro_batches": micro_batches,
        "rows": micro_batch_size,
        "group_size": group_size,
        "delayed_share": delayed_share,
        "resident_weights": resident_weights,
        "resident_state": resident_state,
        "split_master": False if whole_master else None,
        "eight_bit_moments": eight_bit_moments,
        "schedule": schedule,
    }
    found = run_simulation(model, machine=hardware, fixed=fixed, overrides=overrides or [], timeline=timeline)
    typer.echo(json.dumps(found.as_json()) if as_json else found.in_words())


def probe(
    storage: Annotated[list[Path], typer.Option(help="Storage folder to measure; give it again for each further one.")],
    *,
    out: Annotated[Path, typer.Option(help="File to write, for plan --hardware.")] = Path("hardware.json"),
    config: Annotated[
        Path | None, typer.Option(help="A run's settings (YAML): its model's layers are measured, on its device.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each rate; longer is steadier.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure this machine for plan: disks, copies, computation, optimizer. Takes a minute or two."""
    from greedysnake.cli.probing import run_probe

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    hardware = run_probe(storage, out, config, console, seconds=seconds)
    if as_json:
        typer.echo(hardware.model_dump_json(exclude_none=True))
