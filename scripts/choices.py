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
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line sets it, before torch is loaded

import torch
from measured_model import add_model_arguments, model_config, random_batch

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
    add_model_arguments(parser, (24, 1024, 2816, 16, 16), sequence=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[""], help="lines whose name contains one of these")
    arguments = parser.parse_args()
    width = max(map(len, CHOICES))
    print(f"{'':{width}}  step s  tokens/s  compute busy  read busy  write busy")
    for name, settings in CHOICES.items():
        if any(part in name for part in arguments.only):
            print(f"{name:{width}}  {measure(arguments, settings)}", flush=True)


def measure(arguments: argparse.Namespace, settings: dict[str, Any]) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    batch = random_batch(arguments, arguments.micro_batches)
    store = arguments.folder / "store"
    norm, others = settings.get("max_grad_norm"), {k: v for k, v in settings.items() if k != "max_grad_norm"}
    with greedysnake.Trainer(
        model_config(arguments),
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
