"""The command line: one function a verb."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from greedysnake import __version__
from greedysnake.errors import GreedySnakeError

app = typer.Typer(
    name="greedysnake",
    help="Train language models that fit in no memory, streamed from SSD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"greedysnake {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train language models that fit in no memory, streamed from SSD."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's settings, a YAML file (see docs/config.md and examples/).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, like training.steps=20.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    """Train a model as CONFIG says."""
    from greedysnake.cli.training import BROKEN_OFF, run_training
    from greedysnake.config import load_config

    settings = load_config(config, overrides or [])
    summary, _ = run_training(settings, Console(stderr=as_json, soft_wrap=True, highlight=False))
    if as_json:
        typer.echo(json.dumps(summary))
        return
    console = Console(soft_wrap=True, highlight=False)
    if summary["last_loss"] is None:
        console.print(f"No step changed the weights; see {settings.run}.")
        return
    ending = "Done" if summary["stopped_by"] is None else "Stopped early"
    console.print(
        f"{ending}: {summary['steps']} steps, loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s. Everything is in {settings.run}.\n"
        f"Next: greedysnake report {settings.run}, greedysnake export {settings.run} OUT"
    )
    if summary["stopped_by"] == BROKEN_OFF:
        raise typer.Exit(130)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to create; transformers' from_pretrained loads it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a run's trained model to a folder that transformers loads."""
    from greedysnake.cli.exporting import export_run

    report = export_run(run, out)
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console(soft_wrap=True, highlight=False)
    if report["updates_pending"]:
        console.print(
            "Note: the run ended without closing, so the delayed part of its last update is not in these weights."
        )
    console.print(f"Wrote the model after step {report['steps_done']} to {out}.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder; the run may have been killed.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write; default: report.html in the run folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write one HTML page on how a run went and where its time goes."""
    from greedysnake.report.page import write_report

    page, missing = write_report(run, out)
    if as_json:
        typer.echo(json.dumps({"page": str(page), "missing": missing}))
        return
    console = Console(soft_wrap=True, highlight=False)
    for sentence in missing:
        console.print(f"Note: {escape(sentence)}.")
    console.print(f"Wrote {escape(str(page))}; open it in a browser.")


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="CONFIG|PRESET", help="A run's settings (YAML), or gpt-175b and such.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, like training.steps=20.")
    ] = None,
    *,
    hardware: Annotated[
        str | None, typer.Option(help="The machine: a file that probe wrote, or a profile's name such as a100-40gb.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, for days and energy: 20B.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Sequences in a step; default: planned.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches in a step (M).")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch (B).")] = None,
    delayed_share: Annotated[float | None, typer.Option(min=0, max=1, help="Delayed share (α).")] = None,
    layers_per_unit: Annotated[int | None, typer.Option(min=1, help="Decoder layers in a unit.")] = None,
    clipping: Annotated[
        bool | None, typer.Option("--clipping/--no-clipping", help="Whether the gradient's norm is limited.")
    ] = None,
    roofline: Annotated[Path | None, typer.Option(help="Picture to write: tokens/s against the batch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON, and nothing else.")] = False,
) -> None:
    """Predict a run before it starts: speed, memory, disk, days, and what limits it."""
    from greedysnake.cli.planning import parse_count, print_forecast, run_plan

    budget = None if tokens is None else parse_count(tokens)
    fixed = {
        "sequences": sequences,
        "micro_batches": micro_batches,
        "rows": micro_batch_size,
        "delayed_share": delayed_share,
        "layers_per_unit": layers_per_unit,
        "clipping": clipping,
    }
    found = run_plan(model, machine=hardware, fixed=fixed, overrides=overrides or [], picture=roofline)
    if as_json:
        typer.echo(json.dumps(found.as_json(budget)))
        return
    print_forecast(found, Console(soft_wrap=True, highlight=False), budget)


@app.command()
def simulate(
    model: Annotated[str, typer.Argument(metavar="CONFIG|PRESET", help="A run's settings (YAML), or gpt-175b.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, like training.steps=20.")
    ] = None,
    *,
    hardware: Annotated[
        str | None, typer.Option(help="The machine: a file that probe wrote, or a profile's name such as a100-40gb.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="vertical, horizontal, zero-infinity or zero-offload; default: as the settings say."),
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches in a step (M).")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch (B).")] = None,
    delayed_share: Annotated[float | None, typer.Option(min=0, max=1, help="Delayed share (α).")] = None,
    resident_weights: Annotated[float | None, typer.Option(min=0, max=1, help="Weights in host memory.")] = None,
    resident_state: Annotated[float | None, typer.Option(min=0, max=1, help="Optimizer state in host memory.")] = None,
    whole_master: Annotated[bool, typer.Option("--whole-master", help="Whole masters: 30 B a parameter.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Picture to write: the simulated step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")] = False,
) -> None:
    """Simulate a step with choices made by hand, or in another system's order."""
    from greedysnake.cli.simulating import run_simulation

    fixed = {
        "micro_batches": micro_batches,
        "rows": micro_batch_size,
        "delayed_share": delayed_share,
        "resident_weights": resident_weights,
        "resident_state": resident_state,
        "split_master": False if whole_master else None,
        "schedule": schedule,
    }
    found = run_simulation(model, machine=hardware, fixed=fixed, overrides=overrides or [], timeline=timeline)
    typer.echo(json.dumps(found.as_json()) if as_json else found.in_words())


@app.command()
def probe(
    storage: Annotated[list[Path], typer.Option(help="Storage folder to measure; give it again for each further one.")],
    *,
    out: Annotated[Path, typer.Option(help="File to write, for plan --hardware.")] = Path("hardware.json"),
    config: Annotated[
        Path | None, typer.Option(help="A run's settings (YAML): its model's layers are measured, on its device.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure this machine for plan: disks, copies, computation, optimizer. Takes a minute or two."""
    from greedysnake.cli.probing import run_probe

    hardware = run_probe(storage, out, config, Console(stderr=True, soft_wrap=True, highlight=False))
    if as_json:
        typer.echo(hardware.model_dump_json(exclude_none=True))


@app.command()
def demo(
    run: Annotated[
        Path | None, typer.Option(help="Run folder to create; default: a new greedysnake-demo folder.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; default: as many as take a few minutes.")
    ] = None,
) -> None:
    """Train a small Llama from SSD on Python's own source, and show the result."""
    from greedysnake.cli.demo import run_demo

    run_demo(run, steps, Console(soft_wrap=True, highlight=False))


def main() -> None:
    """Entry point: a user's mistake gives one message, not a traceback."""
    # OpenMP's threads wait for their next work by spinning, on cores that I/O and the optimizer need. A short
    # spin is kept: none at all costs more than it gives back. It counts only if set before torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        app()
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted before training began; nothing was kept.")
        sys.exit(130)
    except GreedySnakeError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
