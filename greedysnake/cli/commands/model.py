"""What a run has learnt: ``export`` and ``generate``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from greedysnake.cli.commands.options import Run


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
