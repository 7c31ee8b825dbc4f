"""What is measured, as data that a JSON file holds: settings, cells, and what came of each."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Data(BaseModel):
    """Base of everything in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Method(Data):
    """What all cells of a file have in common.

    Attributes:
        steps: of each run, the uncounted ones included.
        uncounted: first steps of a run whose time does not count.
        rows: sequences of a micro-batch, B.
        tokens: of a sequence, T.
        seed: of weights and batches.
        lr: learning rate.
        max_grad_norm: norm to which gradients are limited; None: not at all.
        threads: of computation.
        second_slot: whether GreedySnake's store has room for snapshots beside what is written.
        hardware: the machine's figures that GreedySnake plans with, a file or a profile's name; None: by a rule.
    """

    steps: int = Field(default=3, ge=1)
    uncounted: int = Field(default=1, ge=0)
    rows: int = Field(default=1, ge=1)
    tokens: int = Field(default=1024, ge=2)
    seed: int = 0
    lr: float = 2e-5
    max_grad_norm: float | None = 1.0
    threads: int = Field(default=1, ge=1)
    second_slot: bool = True
    hardware: str | None = None


class Setting(Data):
    """A line of the matrix: what every system is given alike.

    Attributes:
        model: name of a preset, or a file or folder.
        micro_batches: of a step, M.
        memory: hard limit in bytes; None: none.
        disk: bytes a second to and, separately, from the disk; None: unpaced.
    """

    model: str
    micro_batches: int
    memory: int | None = None
    disk: int | None = None


class Cell(Data):
    """One run of one system in one setting."""

    setting: Setting
    system: str
    run: int = 0


class StepNumbers(Data):
    """One step, as its process measured it.

    Attributes:
        seconds: wall time.
        loss: mean over the step's tokens.
        grad_norm: two-norm of the whole gradient before it is limited; None where the system does not tell.
        read_bytes, written_bytes: of disks, as the kernel counts them for the process (/proc/self/io).
    """

    seconds: float
    loss: float | None
    grad_norm: float | None
    read_bytes: int
    written_bytes: int


Status = Literal["done", "out of memory", "refused", "skipped", "failed", "out of time"]


class Outcome(Data):
    """What came of a cell.

    Attributes:
        status: ``refused``: the system said beforehand that it does not fit; ``skipped``: not possible here.
        why: in words, where it is not ``done``.
        steps: those that were finished.
        seconds: of the whole process.
        setup_seconds: before the first step.
        peak_memory_bytes: as the control group counts it, page cache included.
        process_peak_bytes: largest resident set of the process.
        oom_kills: by the kernel, in the control group.
        read_bytes, written_bytes: of the whole process, as the control group counts them.
        limited_by: what set the limits.
        code: digest of this package when it was measured, whose benchmark and engine change.
        details: what the system says about itself: versions, plan, settings.
    """

    status: Status
    why: str | None = None
    steps: tuple[StepNumbers, ...] = ()
    seconds: float = 0.0
    setup_seconds: float | None = None
    peak_memory_bytes: int | None = None
    process_peak_bytes: int | None = None
    oom_kills: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    limited_by: str | None = None
    code: str | None = None
    details: dict[str, Any] = {}


class Measured(Data):
    """A cell with its outcome."""

    cell: Cell
    outcome: Outcome
