"""A run's folder and its storage: ``verify``, ``clean`` and ``report``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from greedysnake.cli.commands.options import Run


def verify(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check every byte of a run's last snapshot against its checksum."""
    from greedysnake.cli.store import verify_run
    from greedysnake.units import format_bytes

    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    found = verify_run(run, console)
    if as_json:
        typer.echo(json.dumps(found))
    elif found["damaged"]:
        console.print(f"Damaged, {len(found['damaged'])} pieces of {', '.join(found['folders'])}:")
        for damage in found["damaged"]:
            console.print(f"  {escape(damage['message'])}")
    else:
        console.print(
            f"Undamaged: {format_bytes(found['bytes'])}, the state after step {found['steps_done']}, in "
            f"{', '.join(found['folders'])}."
        )
    if found["damaged"]:
        raise typer.Exit(1)


def clean(
    run: Run,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Delete a run's weights and optimizer state from disk; config, metrics and pictures stay."""
    from greedysnake.cli.store import clean_run

    if not yes:
        typer.confirm(f"Delete the storage of {run}? It can then be neither resumed nor exported.", abort=True)
    done = clean_run(run)
    if as_json:
        typer.echo(json.dumps(done))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"Deleted the storage in {', '.join(done['folders'])}.")
    if done["left"]:
        console.print(f"Left, as they are not the storage's own: {escape(', '.join(done['left']))}.")


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
