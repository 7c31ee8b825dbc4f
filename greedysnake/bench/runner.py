"""What the processes that run one cell have in common: the job, its batches, and what they report.

A runner is given its job as JSON (``--json JOB``) and writes a JSON object a line to its standard output: ``ready``
when the first step can begin, ``step`` after each, and at the end ``done``, or ``refused`` with the reason. Everything
else that a library prints goes to standard error. Needs nothing but torch, as one runner lives in another environment.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch import Tensor

COMMON_TOKENS = 256
"""Batches hold the first so many tokens of the vocabulary, low ones more often: something that can be learnt."""
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
"""AdamW's, for every system; the decay is for all parameters alike."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a runner does.

    Attributes:
        model: folder with the first weights, bfloat16.
        storage: folder on the disk that may be used, empty; what is left in it is removed by others.
        micro_batches, rows, tokens: M, B and T.
        steps: to make.
        seed: of the batches.
        lr: learning rate, constant.
        max_grad_norm: norm to which gradients are limited; None: not at all.
        threads: of computation.
        second_slot: as for ``greedysnake.Trainer``.
        settings: of the runner's own.
    """

    model: str
    storage: str
    micro_batches: int
    rows: int
    tokens: int
    steps: int
    seed: int
    lr: float
    max_grad_norm: float | None
    threads: int
    second_slot: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


class Report:
    """Lines of JSON on what was the standard output; prints of libraries go to standard error from here on."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def line(self, event: str, **values: Any) -> None:
        """One line."""
        self._out.write(json.dumps({"event": event, **values}) + "\n")

    def steps(self, job: Job, step: Callable[[list[dict[str, "Tensor"]]], tuple[float, float | None]]) -> None:
        """Make the job's steps, a line each.

        Args:
            job: what is to be done.
            step: one optimizer update from micro-batches; gives loss and gradient norm.
        """
        for number in range(job.steps):
            batch = micro_batches(job, number)
            before, start = disk_bytes(), time.perf_counter()
            loss, norm = step(batch)
            seconds = time.perf_counter() - start
            read, written = (after - first for after, first in zip(disk_bytes(), before, strict=True))
            self.line("step", seconds=seconds, loss=loss, grad_norm=norm, read_bytes=read, written_bytes=written)

    def done(self, **details: Any) -> None:
        """The last line: all went well."""
        self.line("done", process_peak_bytes=peak_bytes(), details=details)


def read_job() -> Job:
    """The job on the command line, as JSON. This process does not outlive the one that started it."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("greedysnake bench has ended")
    parser = argparse.ArgumentParser(description="Runs one cell of greedysnake bench.")
    parser.add_argument("--json", required=True, metavar="JOB", help="the job's fields, see greedysnake.bench.runner")
    return Job(**json.loads(parser.parse_args(sys.argv[1:]).json))


def micro_batches(job: Job, step: int) -> list[dict[str, "Tensor"]]:
    """A step's micro-batches, the same for every system: ``input_ids`` and ``labels``, int64 [B, T] each."""
    import torch

    vocabulary = json.loads((Path(job.model) / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(job.seed * 1_000_003 + step)
    shape = (job.micro_batches, job.rows, job.tokens)
    ids = (torch.rand(shape, generator=generator) ** 3 * min(COMMON_TOKENS, vocabulary)).long()
    return [{"input_ids": part, "labels": part} for part in ids]


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to disks, as the kernel counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def peak_bytes() -> int:
    """Largest resident set that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
