"""The command line, put together of its commands."""

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from greedysnake import __version__
from greedysnake.cli.commands.bench import bench
from greedysnake.cli.commands.model import export, generate
from greedysnake.cli.commands.plan import plan, probe, simulate
from greedysnake.cli.commands.run import demo, preview, resume, train
from greedysnake.cli.commands.run_folder import clean, report, verify
from greedysnake.errors import GreedySnakeError

app = typer.Typer(
    name="greedysnake",
    help="Train language models that fit in no memory, streamed from SSD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

COMMANDS = (train, resume, preview, export, generate, verify, clean, report, plan, simulate, probe, bench, demo)
"""In the order in which ``--help`` shows them."""

for _command in COMMANDS:
    app.command()(_command)


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


def main() -> None:
    """Entry point: a user's mistake gives one message, not a traceback."""
    # OpenMP's threads wait for their next work by spinning, on cores that I/O and the optimizer need. A short
    # spin is kept: none at all costs more than it gives back. It counts only if set before torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        app()
    except GreedySnakeError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
