"""Training a run: ``train``, ``resume``, ``preview`` and ``demo``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from greedysnake.cli.commands.options import Overrides, SummaryAsJson


def train(
    config: Annotated[Path, typer.Argument(help="The run's settings, a YAML file (see docs/config.md and examples/).")],
    overrides: Overrides = None,
    as_json: SummaryAsJson = False,
) -> None:
    """Train a model as CONFIG says."""
    from greedysnake.cli.training import run_training
    from greedysnake.config import load_config

    settings = load_config(config, overrides or [])
    summary, _ = run_training(settings, Console(stderr=as_json, soft_wrap=True, highlight=False))
    _print_summary(summary, settings.run, as_json=as_json)


def resume(
    run: Annotated[Path, typer.Argument(help="A run folder; the run may have been stopped or killed.")],
    overrides: Overrides = None,
    as_json: SummaryAsJson = False,
) -> None:
    """Go on with a run from its last snapshot, exactly as if it had never stopped."""
    from greedysnake.cli.training import resume_training

    summary, _ = resume_training(run, overrides or [], Console(stderr=as_json, soft_wrap=True, highlight=False))
    _print_summary(summary, run, as_json=as_json)


def preview(
    config: Annotated[Path, typer.Argument(help="The run's settings, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, like data.packing=none.")
    ] = None,
    *,
    step: Annotated[int, typer.Option(min=0, help="The step to show, counted from 0.")] = 0,
    rows: Annotated[int, typer.Option(min=0, help="Most sequences to show; 0: all of the step's.")] = 4,
    full: Annotated[bool, typer.Option("--full", help="Show long texts to their end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of the step as JSON, and nothing else.")] = False,
) -> None:
    """Show what a step of training would learn: its sequences as text, and which of it counts in the loss."""
    from greedysnake.cli.preview import describe_preview, show_preview
    from greedysnake.config import load_config

    settings = load_config(config, overrides or [])
    if as_json:
        typer.echo(json.dumps(describe_preview(settings, step), ensure_ascii=False))
    else:
        show_preview(settings, step, Console(highlight=False), most_rows=rows or None, full=full)


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


def _print_summary(summary: dict[str, Any], run: Path, *, as_json: bool) -> None:
    """How a run ended, in a few lines; a run that was broken off ends the program with 130."""
    from greedysnake.cli.training import BROKEN_OFF

    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _describe_ending(summary, run)
    if summary["stopped_by"] == BROKEN_OFF:
        raise typer.Exit(130)


def _describe_ending(summary: dict[str, Any], run: Path) -> None:
    from greedysnake.report.evaluations import EARLY_STOPPING

    console = Console(soft_wrap=True, highlight=False)
    if summary["last_loss"] is None:
        console.print(f"No step changed the weights; see {run}.")
        return
    stopped_by = summary["stopped_by"]
    ending = "Done" if stopped_by is None else "Stopped early"
    again = "" if stopped_by is None or stopped_by.startswith(EARLY_STOPPING) else f"greedysnake resume {run}, "
    console.print(
        f"{ending}: {summary['steps']} steps, loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s. Everything is in {run}."
    )
    if summary["best_eval_loss"] is not None:
        console.print(
            f"On held-out text: loss {summary['first_eval_loss']:.4f} -> {summary['last_eval_loss']:.4f} (perplexity "
            f"{summary['last_eval_perplexity']:.4g}), the lowest {summary['best_eval_loss']:.4f} after step "
            f"{summary['best_eval_step']}"
        )
    best = "" if summary["best_model"] is None else f" (with --best: as of step {summary['best_model']['step']})"
    console.print(f"Next: {again}greedysnake report {run}, greedysnake export {run} OUT{best}")
