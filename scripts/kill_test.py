#!/usr/bin/env python3
"""Kill a training run again and again; resumed each time, it must end bitwise as one that was left alone.

    python scripts/kill_test.py FOLDER [--kills 300] [--seed 0]

Every life of the run is a process of its own that resumes it under other settings (share of delayed updates, what
stays in memory, how often a snapshot is taken) and is sent SIGKILL: half of them at a random moment, half of them
within two milliseconds of a snapshot's commit. In the end the weights, master weights and both Adam moments, and the
losses in metrics.jsonl, are compared with those of a run that was never interrupted. FOLDER must not exist.
"""

import argparse
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console

from greedysnake.cli.training import resume_training, run_training
from greedysnake.config import RunConfig
from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import durable_extents
from greedysnake.report.metrics import read_metrics
from greedysnake.storage import aligned_empty

UNTIL_KILLED = 10**9
LAST_STEPS = 3


@dataclass
class Tally:
    """How the lives of the run ended.

    Attributes:
        at_random: killed at a random moment.
        at_commit: killed within two milliseconds of a commit's beginning or end.
        half_committed: of those, with the new manifest written beside the old one.
        before_training: killed before the run had taken up its last snapshot.
        steps: the step after which the last snapshot was found each time.
    """

    at_random: int = 0
    at_commit: int = 0
    half_committed: int = 0
    before_training: int = 0
    steps: list[int] = field(default_factory=list)


def settings(folder: Path, steps: int) -> RunConfig:
    """A tiny run on text that is made on the spot."""
    text = folder / "text.txt"
    if not text.exists():
        words = ["the ", "quick ", "brown ", "fox ", "jumps ", "over ", "a ", "lazy ", "dog ", "and ", "sleeps. "]
        text.write_text("".join(random.Random(0).choices(words, k=8000)))
    model = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    model |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 258, "max_position_embeddings": 32}
    return RunConfig.model_validate(
        {
            "run": folder / "run",
            "model": {"config": model, "dtype": "bfloat16"},
            "data": {"train": text, "sequence_length": 16},
            "training": {"steps": steps, "micro_batches": 2, "eval_every": None},
            "optimizer": {"lr": 3e-3, "lr_schedule": "constant", "max_grad_norm": 0.5},
            "engine": {"chunk_elements": 4096},
        }
    )


def other_settings(draw: random.Random) -> list[str]:
    """Ways of running that leave the numbers as they are."""
    return [
        f"engine.delayed_share={draw.choice([0, 0.5, 1])}",
        f"engine.resident_state={draw.choice([0, 0, 0.5])}",
        f"engine.resident_weights={draw.choice([0, 0, 0.5])}",
        f"engine.boundaries_on_ssd={draw.choice([0, 1])}",
        f"engine.gradients={draw.choice(['host', 'ssd'])}",
        f"training.snapshot_every={draw.choice([1, 1, 1, 2, 3])}",
        f"training.steps={UNTIL_KILLED}",
    ]


def live(run: Path, overrides: list[str], log: Path) -> int:
    """Start a life of the run in a process of its own; its process number."""
    with log.open("w") as file:  # before the fork: a life may be too short to make it
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            resume_training(run, overrides, Console(file=file))
            file.flush()
            status = 0
        finally:
            os._exit(status)


def manifest_state(store: Path) -> tuple[int, bool]:
    """What changes when a commit begins and ends: which file the manifest is, and whether another is beside it."""
    names = os.listdir(store)
    return (store / "manifest.json").stat().st_ino, any("manifest" in name and name[0] == "." for name in names)


def wait_for_commit(store: Path, draw: random.Random, patience_s: float) -> bool:
    """Return within two milliseconds of a commit; False if there was none."""
    before, end = manifest_state(store), time.monotonic() + patience_s
    skipped = draw.randrange(4)  # not always at the first commit of a life
    while time.monotonic() < end:
        now = manifest_state(store)
        if now != before:
            if skipped == 0:
                pause = time.monotonic() + draw.random() * 0.002 if draw.random() < 0.7 else 0.0
                while time.monotonic() < pause:
                    pass
                return True
            skipped -= 1
            before = now
    return False


def kill_repeatedly(folder: Path, kills: int, draw: random.Random) -> Tally:
    """The lives of the run.

    Raises:
        SystemExit: a life ended by itself, that is with an error.
    """
    run, store, tally = folder / "run", folder / "run" / "store", Tally()
    for number in range(kills):
        log = folder / "life.log"
        child = live(run, other_settings(draw), log)
        if number % 2:
            found = wait_for_commit(store, draw, patience_s=5)
            tally.at_commit += found
            tally.at_random += not found
        else:
            time.sleep(draw.random() ** 2 * 2)
            tally.at_random += 1
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"life {number} ended by itself:\n{log.read_text()}")
        tally.half_committed += manifest_state(store)[1]
        tally.before_training += "Going on" not in log.read_text()
        tally.steps.append(steps_in(store))
        if (number + 1) % max(1, kills // 10) == 0:
            print(f"{number + 1:>6} kills, at step {tally.steps[-1]:,}", flush=True)
    return tally


def steps_in(store: Path) -> int:
    """Steps that the last snapshot holds."""
    opened, _, contents = open_committed([store])
    opened.close()
    return int(contents["progress"]["steps_done"])


def content_of(store: Path) -> dict[str, bytes]:
    """Weights and state of every chunk, bit for bit."""
    opened, skeleton, _ = open_committed([store])
    try:
        found = {}
        for key, size in durable_extents(skeleton.layouts).items():
            into = aligned_empty(size)
            opened.read(key, into).wait()
            found[key] = bytes(into.numpy())
        return found
    finally:
        opened.close()


def differences(one: Path, other: Path) -> list[str]:
    """What two runs that should be the same do not have in common."""
    ours, theirs = content_of(one / "run" / "store"), content_of(other / "run" / "store")
    problems = [f"{key} differs" for key in theirs if ours.get(key) != theirs[key]]
    lines = [read_metrics(folder / "run" / "metrics.jsonl") for folder in (one, other)]
    if [(line["step"], line["loss"]) for line in lines[0]] != [(line["step"], line["loss"]) for line in lines[1]]:
        problems.append("the losses in metrics.jsonl differ")
    return problems


def begin(config: RunConfig, console: Console) -> None:
    """The run's first steps, in a process of their own: training starts threads, and a process with threads cannot be
    forked safely.

    Raises:
        SystemExit: it cannot start.
    """
    first = os.fork()
    if not first:
        run_training(config, console)
        os._exit(0)
    if os.waitpid(first, 0)[1]:
        sys.exit("the run could not start")


def compare_with_whole(troubled: Path, whole: Path, tally: str, steps: int, console: Console) -> int:
    """Resume the run in ``troubled`` to its end, run one in ``whole`` that is left alone, say what differs; the exit
    status.
    """
    resume_training(troubled / "run", [f"training.steps={steps}"], console)
    whole.mkdir()
    run_training(settings(whole, steps), console)
    problems = differences(troubled, whole)
    print(f"{tally}; {steps:,} steps in all")
    print("\n".join(problems) or "weights, master weights, moments and losses are bitwise those of an untouched run")
    return 1 if problems else 0


def main() -> int:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser(description="Kill a training run again and again, and resume it each time.")
    parser.add_argument("folder", type=Path, help="folder to make for the runs")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    killed = arguments.folder / "killed"
    killed.mkdir(parents=True)
    quiet, draw, start = Console(file=(arguments.folder / "log").open("w")), random.Random(arguments.seed), time.time()
    begin(settings(killed, 2), quiet)
    tally = kill_repeatedly(killed, arguments.kills, draw)
    told = (
        f"{arguments.kills} kills in {time.time() - start:.0f} s: {tally.at_random} at random, {tally.at_commit} "
        f"within 2 ms of a commit ({tally.half_committed} left a half-made one), {tally.before_training} before the "
        f"run had gone on"
    )
    return compare_with_whole(killed, arguments.folder / "whole", told, tally.steps[-1] + LAST_STEPS, quiet)


if __name__ == "__main__":
    sys.exit(main())
