"""Comparing systems: ``bench``."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from greedysnake.errors import ConfigError

# What is compared
Models = Annotated[
    list[str] | None, typer.Option(help="tiny, 0.37b, 1.1b, 3b, a model folder or a config file; several: again.")
]
StepSizes = Annotated[
    list[int] | None, typer.Option(min=1, help="Micro-batches in a step (M); several: again. Default: 4.")
]
MemoryLimits = Annotated[
    list[str] | None, typer.Option(help="Hard memory limit such as 8GiB, or none; several: again.")
]
DiskRates = Annotated[
    list[str] | None, typer.Option(help="Disk rate a second, each direction: 400M, or none; several: again.")
]
Systems = Annotated[
    list[str] | None,
    typer.Option(
        help="greedysnake, greedysnake-streamed, horizontal, zero-infinity, zero-infinity-weights-in-memory, "
        "zero-infinity-activations-in-memory, zero-infinity-in-memory, zero-infinity-least-memory, zero-offload, "
        "zero-offload-activations-in-memory, torch, torch-activations-in-memory, torch-swap; several: again. With "
        "-float32-products behind a name of DeepSpeed's or PyTorch's, it is lent GreedySnake's products of 16-bit "
        "matrices. Default: the first four and torch."
    ),
]
Ablated = Annotated[
    str | None,
    typer.Option(help="greedysnake or greedysnake-streamed: switch off one thing at a time, instead of --system."),
]
SmallestMemory = Annotated[
    bool, typer.Option("--smallest-memory", help="Find the smallest memory limit in which each system trains.")
]

# How each run goes
Runs = Annotated[int, typer.Option(min=1, help="Runs of each cell.")]
Steps = Annotated[int, typer.Option(min=2, help="Steps of each run; the first is not counted.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of a sequence (T).")]
Rows = Annotated[int, typer.Option(min=1, help="Sequences in a micro-batch (B).")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of computation, for every system; default: all.")]
Seed = Annotated[int, typer.Option(min=0, help="Of weights and batches.")]
Clipping = Annotated[bool, typer.Option("--clipping/--no-clipping", help="Whether gradients are limited to norm 1.")]
SecondSlot = Annotated[
    bool, typer.Option("--second-slot/--no-second-slot", help="Whether the store has room for snapshots.")
]

# Where it is measured, and what comes of it
Storage = Annotated[
    Path | None, typer.Option(help="Folder on the SSD to measure with; weights to start from stay in it.")
]
Out = Annotated[
    Path, typer.Option(help="File of results, written after each cell; the same file again: what is missing.")
]
PeerEnvironment = Annotated[Path | None, typer.Option(help="Virtual environment with DeepSpeed, for zero-infinity.")]
NewPeerEnvironment = Annotated[
    Path | None, typer.Option(help="Make that environment in this folder, and do nothing else.")
]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds after which a cell is ended.")]
Machine = Annotated[
    str | None, typer.Option(help="A file that probe wrote, for the first estimate of the time it takes.")
]
TableAsJson = Annotated[bool, typer.Option("--json", help="Print the table as JSON, and nothing else.")]


def bench(
    storage: Storage = None,
    *,
    out: Out = Path("bench.json"),
    model: Models = None,
    micro_batches: StepSizes = None,
    memory: MemoryLimits = None,
    disk: DiskRates = None,
    system: Systems = None,
    runs: Runs = 3,
    steps: Steps = 3,
    tokens: Tokens = 1024,
    micro_batch_size: Rows = 1,
    threads: Threads = None,
    seed: Seed = 0,
    clipping: Clipping = True,
    second_slot: SecondSlot = True,
    ablate: Ablated = None,
    smallest_memory: SmallestMemory = False,
    zero_infinity: PeerEnvironment = None,
    install_zero_infinity: NewPeerEnvironment = None,
    timeout: Timeout = 3600.0,
    hardware: Machine = None,
    as_json: TableAsJson = False,
) -> None:
    """Compare systems on this machine, each in its own process within the same hard limits."""
    console = Console(stderr=as_json, highlight=False)
    if install_zero_infinity is not None:
        _install_peer(install_zero_infinity, console)
        return
    if storage is None:
        raise ConfigError("--storage: missing; needs a folder on the SSD to measure with")
    from greedysnake.bench.cells import Method
    from greedysnake.bench.measure import Place
    from greedysnake.cli.benching import DEFAULT_MACHINE, Question, run_bench
    from greedysnake.plan.hardware import load_hardware

    method = Method(
        steps=steps,
        uncounted=1,
        rows=micro_batch_size,
        tokens=tokens,
        seed=seed,
        max_grad_norm=1.0 if clipping else None,
        threads=threads or len(os.sched_getaffinity(0)),
        second_slot=second_slot,
        hardware=hardware,
    )
    logs = out.with_name(f"{out.stem}-logs")
    figures = None if hardware is None else load_hardware(hardware)
    place = Place(storage=storage, logs=logs, zero_infinity=zero_infinity, hardware=figures, seconds=timeout)
    question = Question(
        models=model or ["0.37b"],
        micro_batches=micro_batches or [4],
        memory=memory or [],
        disk=disk or [],
        systems=system or [],
        runs=runs,
        method=method,
        place=place,
        out=out,
        machine=hardware or DEFAULT_MACHINE,
        ablate=ablate,
        smallest=smallest_memory,
    )
    with _interruptible(out, console):
        found = run_bench(question, console)
    if as_json:
        typer.echo(json.dumps(found))


def _install_peer(folder: Path, console: Console) -> None:
    from greedysnake.bench.install_peer import install_zero_infinity

    install_zero_infinity(folder, lambda text: console.print(escape(text)))


@contextmanager
def _interruptible(out: Path, console: Console) -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and a closed terminal alike end what runs, tidy up, and end the program with 130."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print(escape(f"Stopped. {out} has what was measured; the same command goes on."))
        raise typer.Exit(130) from None
