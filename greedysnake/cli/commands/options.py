"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, like training.steps=20.")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Hardware = Annotated[
    str | None,
    typer.Option(help="The machine: a file that probe wrote, or a profile's name; default for a preset: a100-40gb."),
]
MicroBatches = Annotated[int | None, typer.Option(min=1, help="Micro-batches in a step (M).")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch (B).")]
GroupSize = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches that pass the layers together before the next ones begin.")
]
DelayedShare = Annotated[float | None, typer.Option(min=0, max=1, help="Delayed share (α).")]
SummaryAsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")]
