"""What a snapshot at every step costs: two trainers, one that takes them and one that does not, step in turns.

    python scripts/snapshot_cost.py FOLDER [--steps 4 --layers 22 --hidden 2048 ...]

The default model is a 1.1 B-parameter Llama, M = 1. Both stores lie on the same disk, and the turns let whatever else
the machine does meet both alike. The first step of each is not counted.
"""

import argparse
import os
import shutil
import statistics
from contextlib import ExitStack

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line sets it, before torch is loaded

from measured_model import add_model_arguments, model_config, random_batch

import greedysnake

EVERY = {"a snapshot at every step": 1, "none": 10**6}


def main() -> None:
    """Measure and print the seconds of each step and what the medians say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, (22, 2048, 5632, 32, 4), sequence=1024)
    parser.add_argument("--micro-batches", type=int, default=1)
    arguments = parser.parse_args()
    batch = random_batch(arguments, arguments.micro_batches)
    seconds: dict[str, list[float]] = {name: [] for name in EVERY}
    with ExitStack() as opened:
        trainers = {}
        for name, every in EVERY.items():
            store = arguments.folder / f"store-{every}"
            opened.callback(shutil.rmtree, store, ignore_errors=True)
            optimizer = greedysnake.AdamW(lr=1e-5, max_grad_norm=1.0)
            trainers[name] = opened.enter_context(
                greedysnake.Trainer(
                    model_config(arguments),
                    store,
                    optimizer=optimizer,
                    host_memory=arguments.host_memory,
                    gradients="host",
                    delayed_share=1.0,
                    snapshot_every=every,
                )
            )
            trainers[name].step(batch)
        for turn in range(arguments.steps):
            for name in sorted(trainers, reverse=bool(turn % 2)):
                seconds[name].append(trainers[name].step(batch).seconds)
                print(f"{name:26} {seconds[name][-1]:8.2f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    with_snapshots, without = (medians[name] for name in EVERY)
    print(f"medians {with_snapshots:.2f} s with, {without:.2f} s without: {with_snapshots / without - 1:+.1%}")


if __name__ == "__main__":
    main()
