"""The command line: one function a verb."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from greedysnake import __version__
from greedysnake.errors import GreedySnakeError
from greedysnake.plan.collecting import without_collecting

app = typer.Typer(
    name="greedysnake",
    help="Train language models that fit in no memory, streamed from SSD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, like training.steps=20.")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Hardware = Annotated[
    str | None, typer.Option(help="The machine: a file that probe wrote, or a profile's name such as a100-40gb.")
]
MicroBatches = Annotated[int | None, typer.Option(min=1, help="Micro-batches in a step (M).")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch (B).")]
DelayedShare = Annotated[float | None, typer.Option(min=0, max=1, help="Delayed share (α).")]
SummaryAsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")]


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
    overrides: Overrides = None,
    as_json: SummaryAsJson = False,
) -> None:
    """Train a model as CONFIG says."""
    from greedysnake.cli.training import run_training
    from greedysnake.config import load_config

    settings = load_config(config, overrides or [])
    summary, _ = run_training(settings, Console(stderr=as_json, soft_wrap=True, highlight=False))
    _print_summary(summary, settings.run, as_json=as_json)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run folder; the run may have been stopped or killed.")],
    overrides: Overrides = None,
    as_json: SummaryAsJson = False,
) -> None:
    """Go on with a run from its last snapshot, exactly as if it had never stopped."""
    from greedysnake.cli.training import resume_training

    summary, _ = resume_training(run, overrides or [], Console(stderr=as_json, soft_wrap=True, highlight=False))
    _print_summary(summary, run, as_json=as_json)


def _print_summary(summary: dict[str, Any], run: Path, *, as_json: bool) -> None:
    """How a run ended, in a few lines; a run that was broken off ends the program with 130."""
    from greedysnake.cli.training import BROKEN_OFF
    from greedysnake.report.evaluations import EARLY_STOPPING

    if as_json:
        typer.echo(json.dumps(summary))
        return
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
    if stopped_by == BROKEN_OFF:
        raise typer.Exit(130)


@app.command()
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


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="Folder to create; transformers' from_pretrained loads it.")],
    *,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16, or float32: the master weights exactly; default: the run's."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a weight file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model folder that is there.")] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with LoRA: the whole model, with the adapters merged into it.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="The weights of the lowest evaluation loss, as training.keep_best kept them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a run's trained model to a folder that transformers loads; of LoRA, the adapters for peft."""
    from greedysnake.cli.best import export_best
    from greedysnake.cli.exporting import export_run

    bar = Console(stderr=True, soft_wrap=True, highlight=False)
    if best:
        report = export_best(run, out, overwrite=overwrite, dtype=dtype, merge=merge)
    else:
        report = export_run(
            run, out, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite, merge=merge, console=bar
        )
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console(soft_wrap=True, highlight=False)
    what = "adapters" if report["adapter"] else "model"
    console.print(f"Wrote the {what} after step {report['steps_done']} to {out}.")


@app.command()
def generate(
    source: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run folder or a model folder.")],
    *,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to go on from; give it again for more.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with a prompt a line; .jsonl: a string or an object with prompt a line.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens added to a prompt.")] = 128,
    temperature: Annotated[float | None, typer.Option(min=0.001, help="Draw tokens; above 1: more freely.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Draw from the likeliest of this share.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the drawing.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token each time.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    tokenizer: Annotated[str | None, typer.Option(help="Folder of a tokenizer, or bytes; default: its own.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory to use, like 16GiB; default: what is free.")
    ] = None,
    device: Annotated[str, typer.Option(help="As engine.device.")] = "auto",
    scratch: Annotated[
        Path | None, typer.Option(help="Folder, best on SSD, for a model folder's weights that do not fit in memory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the texts as JSON, and nothing else.")] = False,
) -> None:
    """Generate text with a run's model or a model folder, streamed from SSD where it does not fit in memory."""
    from greedysnake.cli.generating import GenerationRequest, generate_text
    from greedysnake.cli.prompts import read_prompts

    prompts = [*(prompt or []), *(read_prompts(prompt_file) if prompt_file else [])]
    request = GenerationRequest(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        greedy=greedy,
        chat=chat,
        tokenizer=tokenizer,
        host_memory=host_memory,
        device=device,
        scratch=scratch,
    )
    live = len(prompts) == 1 and not as_json
    report = generate_text(source, prompts, request, Console(stderr=True, soft_wrap=True, highlight=False), live=live)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
        return
    if not live:
        for completion in report["completions"]:
            typer.echo(f"--- {completion['prompt']}\n{completion['text']}")
    typer.echo(
        f"{report['new_tokens']} tokens in {report['seconds']:.1f} s, {report['tokens_per_second']:.2f} tokens/s",
        err=True,
    )


@app.command()
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


@app.command()
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
    overrides: Overrides = None,
    *,
    hardware: Hardware = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, for days and energy: 20B.")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="Sequences in a step; default: planned.")] = None,
    micro_batches: MicroBatches = None,
    micro_batch_size: MicroBatchSize = None,
    delayed_share: DelayedShare = None,
    layers_per_unit: Annotated[int | None, typer.Option(min=1, help="Decoder layers in a unit.")] = None,
    clipping: Annotated[
        bool | None, typer.Option("--clipping/--no-clipping", help="Whether the gradient's norm is limited.")
    ] = None,
    roofline: Annotated[Path | None, typer.Option(help="Picture to write: tokens/s against the batch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON, and nothing else.")] = False,
) -> None:
    """Predict a run before it starts: speed, memory, disk, days, and what limits it."""
    fixed = {
        "sequences": sequences,
        "micro_batches": micro_batches,
        "rows": micro_batch_size,
        "delayed_share": delayed_share,
        "layers_per_unit": layers_per_unit,
        "clipping": clipping,
    }
    with without_collecting():  # from the loading of libraries on
        from greedysnake.cli.planning import parse_count, print_forecast, run_plan

        budget = None if tokens is None else parse_count(tokens)
        found = run_plan(model, machine=hardware, fixed=fixed, overrides=overrides or [], picture=roofline)
    if as_json:
        typer.echo(json.dumps(found.as_json(budget)))
        return
    print_forecast(found, Console(soft_wrap=True, highlight=False), budget)


@app.command()
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
    delayed_share: DelayedShare = None,
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
    seconds: Annotated[float, typer.Option(min=0.1, help="For each rate; longer is steadier.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure this machine for plan: disks, copies, computation, optimizer. Takes a minute or two."""
    from greedysnake.cli.probing import run_probe

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    hardware = run_probe(storage, out, config, console, seconds=seconds)
    if as_json:
        typer.echo(hardware.model_dump_json(exclude_none=True))


@app.command()
def bench(
    storage: Annotated[
        Path | None, typer.Option(help="Folder on the SSD to measure with; weights to start from stay in it.")
    ] = None,
    *,
    out: Annotated[
        Path, typer.Option(help="File of results, written after each cell; the same file again: what is missing.")
    ] = Path("bench.json"),
    model: Annotated[
        list[str] | None, typer.Option(help="tiny, 0.37b, 1.1b, 3b, a model folder or a config file; several: again.")
    ] = None,
    micro_batches: Annotated[
        list[int] | None, typer.Option(min=1, help="Micro-batches in a step (M); several: again. Default: 4.")
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help="Hard memory limit such as 8GiB, or none; several: again.")
    ] = None,
    disk: Annotated[
        list[str] | None, typer.Option(help="Disk rate a second, each direction: 400M, or none; several: again.")
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(
            help="greedysnake, greedysnake-streamed, horizontal, zero-infinity, zero-infinity-weights-in-memory, "
            "torch, torch-swap; several: again. Default: all but zero-infinity-weights-in-memory and torch-swap."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run; the first is not counted.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a sequence (T).")] = 1024,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a micro-batch (B).")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Of computation, for every system; default: all.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    clipping: Annotated[
        bool, typer.Option("--clipping/--no-clipping", help="Whether gradients are limited to norm 1.")
    ] = True,
    second_slot: Annotated[
        bool, typer.Option("--second-slot/--no-second-slot", help="Whether the store has room for snapshots.")
    ] = True,
    ablate: Annotated[
        str | None,
        typer.Option(help="greedysnake or greedysnake-streamed: switch off one thing at a time, instead of --system."),
    ] = None,
    smallest_memory: Annotated[
        bool, typer.Option("--smallest-memory", help="Find the smallest memory limit in which each system trains.")
    ] = False,
    zero_infinity: Annotated[
        Path | None, typer.Option(help="Virtual environment with DeepSpeed, for zero-infinity.")
    ] = None,
    install_zero_infinity: Annotated[
        Path | None, typer.Option(help="Make that environment in this folder, and do nothing else.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a cell is ended.")] = 3600.0,
    hardware: Annotated[
        str | None, typer.Option(help="A file that probe wrote, for the first estimate of the time it takes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, and nothing else.")] = False,
) -> None:
    """Compare systems on this machine, each in its own process within the same hard limits."""
    from greedysnake.errors import ConfigError

    console = Console(stderr=as_json, highlight=False)
    if install_zero_infinity is not None:
        from greedysnake.bench.install_peer import install_zero_infinity as install

        install(install_zero_infinity, lambda text: console.print(escape(text)))
        return
    if storage is None:
        raise ConfigError("--storage: missing; needs a folder on the SSD to measure with")
    from greedysnake.bench.cells import Method
    from greedysnake.bench.measure import Place
    from greedysnake.cli.benching import DEFAULT_MACHINE, Question, run_bench

    question = Question(
        models=model or ["0.37b"],
        micro_batches=micro_batches or [4],
        memory=memory or [],
        disk=disk or [],
        systems=system or [],
        runs=runs,
        method=Method(
            steps=steps,
            uncounted=min(1, steps - 1),
            rows=micro_batch_size,
            tokens=tokens,
            seed=seed,
            max_grad_norm=1.0 if clipping else None,
            threads=threads or len(os.sched_getaffinity(0)),
            second_slot=second_slot,
        ),
        place=Place(
            storage=storage,
            logs=out.with_name(f"{out.stem}-logs"),
            zero_infinity=zero_infinity,
            seconds=timeout,
        ),
        out=out,
        machine=hardware or DEFAULT_MACHINE,
        ablate=ablate,
        smallest=smallest_memory,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: end what runs, and tidy up
    try:
        found = run_bench(question, console)
    except KeyboardInterrupt:
        console.print(escape(f"Stopped. {out} has what was measured; the same command goes on."))
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(found))


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
    except KeyboardInterrupt as interrupt:
        message = str(interrupt) or "Interrupted before training began; nothing was kept."
        Console(stderr=True).print(escape(message), highlight=False, soft_wrap=True)
        sys.exit(130)
    except GreedySnakeError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
