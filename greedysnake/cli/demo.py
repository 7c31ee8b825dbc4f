"""The demo: a small Llama trained from SSD on the running Python's standard library."""

import sysconfig
import time
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from greedysnake.cli.exporting import export_run
from greedysnake.cli.loop import LOSS_PICTURE, TIMELINE_PICTURE
from greedysnake.cli.training import BROKEN_OFF, run_training
from greedysnake.config import RunConfig
from greedysnake.errors import DataError

STEPS = 160
TRAINING_SECONDS = 170
PROMPT = "import "
SAMPLES = 3


def run_demo(run: Path | None, steps: int | None, console: Console) -> None:
    """Train, sample, and say where everything is.

    Args:
        run: folder to create; None for a new ``greedysnake-demo`` in the current folder.
        steps: training steps.
        console: to print to.
    """
    start = time.perf_counter()
    folder = run or _new_folder(Path("greedysnake-demo"))
    dtype, rate = faster_dtype()
    steps = steps or steps_within(TRAINING_SECONDS, rate)
    console.print(
        "GreedySnake demo: a small Llama learns Python from the standard library's own source.\n"
        "Weights, master weights and both Adam moments live in files; layers pass through memory one by one.",
    )
    summary, evaluations = run_training(demo_config(folder, steps, dtype), console)
    if summary["stopped_by"] == BROKEN_OFF:
        raise typer.Exit(130)
    if not evaluations:
        return
    export_run(folder, folder / "model")
    before, after = evaluations[0][1], evaluations[-1][1]
    console.print(f"\nLoss on held-out text: {before:.3f} before, {after:.3f} after {summary['steps']} steps.")
    console.print(f"What it writes now, given {PROMPT!r}:\n")
    console.print(escape(_sample(folder / "model")), style="green")
    console.print(
        f"\nIn {time.perf_counter() - start:.0f} s, all in {folder}/:\n"
        f"  {LOSS_PICTURE}       the loss curve\n"
        f"  {TIMELINE_PICTURE}   one step: what each resource did when\n"
        f"  trace.json     the same, for https://ui.perfetto.dev\n"
        f"  metrics.jsonl  a line a step\n"
        f"  model/         the trained model, for transformers' from_pretrained",
    )


def faster_dtype() -> tuple[str, float]:
    """The dtype in which this processor multiplies matrices of the demo's sizes faster, and its rate in FLOP/s."""
    rates = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        left, right = torch.ones(512, 384, dtype=dtype), torch.ones(384, 1024, dtype=dtype)
        torch.mm(left, right)
        start, products = time.perf_counter(), 0
        while time.perf_counter() - start < 0.2:
            torch.mm(left, right)
            products += 1
        rates[name] = 2 * 512 * 384 * 1024 * products / (time.perf_counter() - start)
    best = max(rates, key=lambda name: rates[name])
    return best, rates[best]


def steps_within(seconds: float, rate: float) -> int:
    """Steps that a processor of ``rate`` FLOP/s can do in ``seconds``, fewer than usual only where it is slow.

    A step takes 8 FLOP a parameter and token (forward, recompute, backward), at well under half the rate of
    bare products once attention and elementwise operations are counted.
    """
    per_step = 8 * 10.8e6 * 2048 / (0.4 * rate)
    return max(40, min(STEPS, int(seconds / per_step)))


def demo_config(run: Path, steps: int, dtype: str) -> RunConfig:
    """Settings of the demo: 10.8 M parameters, 2,048 bytes of text a step."""
    return RunConfig.model_validate(
        {
            "run": run,
            "model": {
                "dtype": dtype,
                "config": {
                    "model_type": "llama",
                    "hidden_size": 384,
                    "intermediate_size": 1024,
                    "num_hidden_layers": 6,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 6,
                    "vocab_size": 258,
                    "max_position_embeddings": 256,
                },
            },
            "data": {"train": standard_library(), "eval_share": 0.02, "sequence_length": 256},
            "training": {
                "steps": steps,
                "micro_batches": 4,
                "micro_batch_size": 2,
                "eval_every": max(1, steps // 8),
                "eval_sequences": 16,
            },
            "optimizer": {"lr": 1.5e-3, "warmup_steps": min(10, steps - 1), "max_grad_norm": 1.0},
            "engine": {"chunk_elements": 2**20},
        }
    )


def standard_library() -> list[Path]:
    """The top-level modules of the running Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    if not modules:
        raise DataError(f"{folder} holds no Python source, so the demo has nothing to learn from")
    return modules


def _new_folder(wanted: Path) -> Path:
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _sample(model_folder: Path) -> str:
    """Text that the exported model writes, by transformers alone."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True)
    inputs = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    texts = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(SAMPLES):
            torch.manual_seed(seed)
            ids = model.generate(
                inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=200,
                do_sample=True,
                temperature=0.8,
                top_p=0.9,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts.append(tokenizer.decode(ids[0], skip_special_tokens=True).rstrip())
    # early in training, much of what it writes is indentation: show the sample with the most to see
    return max(texts, key=lambda text: sum(not character.isspace() for character in text))
