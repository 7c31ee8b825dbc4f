"""How well a step overlaps: its time, that of its I/O alone, and that of its computation and optimizer alone.

    python scripts/overlap.py FOLDER [--layers 22 --hidden 2048 ... --micro-batches 1 2 4 8]

The default model is a 1.1 B-parameter Llama. A step cannot be faster than the slower of the two. Bytes are what the
kernel counts for this process (/proc/self/io) in the last step, for each parameter.
"""

import argparse
import os
import shutil
import statistics
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line sets it, before torch is loaded

from measured_model import add_model_arguments, model_config, random_batch

import greedysnake
from greedysnake.report.trace import busy_shares
from greedysnake.schedule import Resource

IO = (Resource.SSD_READ, Resource.SSD_WRITE)
REST = tuple(resource for resource in Resource if resource not in IO)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, (22, 2048, 5632, 32, 4), sequence=1024)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--delayed-share", type=float, default=None)
    parser.add_argument("--schedule", default="vertical")
    parser.add_argument("--no-clipping", action="store_true")
    arguments = parser.parse_args()
    print(" M  step s  I/O alone  compute alone  step / slower  compute busy  tokens/s  read B/param  written B/param")
    for micro_batches in arguments.micro_batches:
        print(measure(arguments, micro_batches), flush=True)


def measure(arguments: argparse.Namespace, micro_batches: int) -> str:
    """One line of the table."""
    batch = random_batch(arguments, micro_batches)
    store = arguments.folder / "store"
    trainer = greedysnake.Trainer(
        model_config(arguments),
        store,
        optimizer=greedysnake.AdamW(lr=1e-5, max_grad_norm=None if arguments.no_clipping else 1.0),
        host_memory=arguments.host_memory,
        delayed_share=arguments.delayed_share,
        schedule=arguments.schedule,
    )
    try:
        trainer.step(batch)
        results = []
        for _ in range(arguments.steps):
            before = kernel_bytes()
            results.append(trainer.step(batch))
            moved = [after - start for after, start in zip(kernel_bytes(), before, strict=True)]
        step = statistics.median(result.seconds for result in results)
        transfers = statistics.median(trainer.measure(batch, IO) for _ in range(arguments.steps))
        computation = trainer.measure(batch, REST)
    finally:
        trainer.close()
        shutil.rmtree(store, ignore_errors=True)
    parameters = sum(slot.elements for layout in trainer.skeleton.layouts for slot in layout.parameters)
    read, written = (count / parameters for count in moved)
    busy = busy_shares(results[-1].events, results[-1].seconds)[Resource.COMPUTE]
    return (
        f"{micro_batches:>2}  {step:6.1f}  {transfers:9.1f}  {computation:13.1f}  "
        f"{step / max(transfers, computation):13.2f}  {busy:12.0%}  {results[-1].tokens / step:8.0f}  {read:12.2f}  "
        f"{written:15.2f}"
    )


def kernel_bytes() -> list[int]:
    """Bytes that this process has had read from and written to disk, as the kernel counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(fields["read_bytes"]), int(fields["write_bytes"])]


if __name__ == "__main__":
    main()
