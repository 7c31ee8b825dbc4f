#!/usr/bin/env python3
"""Many small steps: nothing that a step uses may be left behind.

    python scripts/soak.py [--steps 10000] [FOLDER]

Prints resident memory, threads and open files ten times, and exits with 1 if memory grew by more than 5 % after
the first line, or if threads or open files grew at all. FOLDER, which must not exist, holds the store while it
runs; without one a temporary folder does.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig

from greedysnake import AdamW, Trainer
from greedysnake.storage.folders import READ_THREADS, WRITE_THREADS

MEMORY_GROWTH = 0.05
LINES = 10
LOOKS = 20
SECONDS_BETWEEN_LOOKS = 0.01


@dataclass(frozen=True)
class Usage:
    """What the process holds after a step."""

    step: int
    memory_bytes: int
    threads: int
    files: int
    milliseconds: float

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**20:.1f}"
        return f"{self.step:>8,} {memory:>12} {self.threads:>8} {self.files:>11} {self.milliseconds:>8.1f}"


HEADING = f"{'step':>8} {'memory MiB':>12} {'threads':>8} {'open files':>11} {'ms/step':>8}"


def measure(step: int, milliseconds: float) -> Usage:
    """Usage of this process now; the store's pools of threads count as full."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(
        step=step,
        memory_bytes=pages * os.sysconf("SC_PAGESIZE"),
        threads=_threads_that_stay() + READ_THREADS + WRITE_THREADS - _pool_threads(),
        files=len(os.listdir("/proc/self/fd")),
        milliseconds=milliseconds,
    )


def _threads_that_stay() -> int:
    """Threads of this process; one that Python has joined is the kernel's for a moment more, so the least of looks."""
    counts = []
    for _ in range(LOOKS):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return min(counts)


def _pool_threads() -> int:
    """Threads that the store's pools have started: one more whenever all are busy, up to their limit."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name.startswith(("greedysnake-read", "greedysnake-write")) for name in names)


def growth(lines: list[Usage]) -> list[str]:
    """What grew between the first and the last line."""
    first, last = lines[0], lines[-1]
    found = []
    if last.memory_bytes > first.memory_bytes * (1 + MEMORY_GROWTH):
        share = last.memory_bytes / first.memory_bytes - 1
        found.append(f"resident memory grew by {share:.1%} between step {first.step:,} and step {last.step:,}")
    for name in ("threads", "files"):
        before, after = getattr(first, name), getattr(last, name)
        if after > before:
            found.append(f"{name} grew from {before} to {after} between step {first.step:,} and step {last.step:,}")
    return found


def soak(folder: Path, steps: int) -> list[Usage]:
    """Train a tiny model, everything that can be on SSD there; usage at a tenth of the steps, two tenths, ..."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    generator = torch.Generator().manual_seed(0)
    lines = []
    with Trainer(
        config, folder, optimizer=AdamW(lr=1e-3), delayed_share=0.5, boundaries_on_ssd=1.0, gradients="ssd"
    ) as trainer:
        print(HEADING, flush=True)
        start, since = time.perf_counter(), 0
        for step in range(1, steps + 1):
            tokens = torch.randint(0, 64, (2, 1, 8), generator=generator)
            trainer.step([{"input_ids": ids, "labels": ids} for ids in tokens])
            if step % max(1, steps // LINES) == 0:
                seconds = time.perf_counter() - start
                lines.append(measure(step, 1000 * seconds / (step - since)))
                print(lines[-1], flush=True)
                start, since = time.perf_counter(), step
    return lines


def main() -> int:
    """Soak, and say what grew."""
    parser = argparse.ArgumentParser(description="Many small steps: nothing that a step uses may be left behind.")
    parser.add_argument("folder", nargs="?", type=Path, help="folder to make for the store (default: a temporary one)")
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    with tempfile.TemporaryDirectory() as temporary:
        lines = soak(arguments.folder or Path(temporary) / "store", arguments.steps)
    problems = growth(lines)
    print("\n".join(problems) or "nothing grew")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
