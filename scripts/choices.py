"""What each choice is worth: the same model and batch, one choice changed at a time, one after another in one run.

    python scripts/choices.py FOLDER [--sequence 128 --micro-batches 8 ...]

Run it behind a disk that is paced, or slow, to see what the order of the work does. The default model has 0.37 B
parameters. Gradients stay in host memory, nothing is resident. Each line is the median of some steps after one that
is not counted.
"""

import argparse
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line sets it, before torch is loaded

import torch
from transformers import AutoConfig

import greedysnake
from greedysnake.report.trace import busy_shares
from greedysnake.schedule import Resource

NEVER, ALWAYS = 1e9, 1e-6  # gradient norms: one that is never reached, one that always is

CHOICES: dict[str, dict[str, Any]] = {
    "horizontal": {"schedule": "horizontal", "delayed_share": 0.35},
    "vertical, α = 0": {"delayed_share": 0.0},
    "vertical, α = 0.35": {"delayed_share": 0.35},
    "vertical, α = 0.5": {"delayed_share": 0.5},
    "vertical, α = 1": {"delayed_share": 1.0},
    "vertical, α = 0.35, no overlap": {"delayed_share": 0.35, "overlap": False},
    "vertical, α = 1, clipping on, none happens": {"delayed_share": 1.0, "max_grad_norm": NEVER},
    "vertical, α = 1, clipping in each step": {"delayed_share": 1.0, "max_grad_norm": ALWAYS},
    "vertical, α = 0.35, clipping on, none happens": {"delayed_share": 0.35, "max_grad_norm": NEVER},
    "vertical, α = 0.35, clipping in each step": {"delayed_share": 0.35, "max_grad_norm": ALWAYS},
    "vertical, α = 1, no snapshots": {"delayed_share": 1.0, "snapshot_every": 10**6},
}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder on the SSD to measure with; its store is removed at the end")
    for name, default in (("layers", 24), ("hidden", 1024), ("ffn", 2816), ("heads", 16), ("kv-heads", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps measured, after one that is not")
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--only", nargs="+", default=[""], help="lines whose name contains one of these")
    arguments = parser.parse_args()
    width = max(map(len, CHOICES))
    print(f"{'':{width}}  step s  tokens/s  compute busy  read busy  write busy")
    for name, settings in CHOICES.items():
        if any(part in name for part in arguments.only):
            print(f"{name:{width}}  {measure(arguments, settings)}", flush=True)


def measure(arguments: argparse.Namespace, settings: dict[str, Any]) -> str:
    """One line of the table."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.sequence,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, arguments.vocabulary, (arguments.micro_batches, 1, arguments.sequence))
    batch = [{"input_ids": part, "labels": part} for part in ids]
    store = arguments.folder / "store"
    norm, others = settings.get("max_grad_norm"), {k: v for k, v in settings.items() if k != "max_grad_norm"}
    with greedysnake.Trainer(
        config,
        store,
        optimizer=greedysnake.AdamW(lr=1e-5, max_grad_norm=norm),
        host_memory=arguments.host_memory,
        gradients="host",
        **others,
    ) as trainer:
        trainer.step(batch)
        results = [trainer.step(batch) for _ in range(arguments.steps)]
    shutil.rmtree(store)
    for result in results:
        if result.clipped != (norm == ALWAYS):
            raise SystemExit(f"a step was {'' if result.clipped else 'not '}clipped")
    seconds = statistics.median(result.seconds for result in results)
    busy = busy_shares(results[-1].events, results[-1].seconds)
    shares = "".join(
        f"{busy[resource]:{width}.0%}"
        for resource, width in ((Resource.COMPUTE, 14), (Resource.SSD_READ, 11), (Resource.SSD_WRITE, 12))
    )
    return f"{seconds:6.1f}  {results[-1].tokens / seconds:8.1f}{shares}"


if __name__ == "__main__":
    main()
