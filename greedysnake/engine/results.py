"""What a step of training tells."""

from dataclasses import dataclass

from greedysnake.report.events import OperationEvent
from greedysnake.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        step: its number, from 1.
        loss: sum over its micro-batches divided by all its target tokens.
        grad_norm: two-norm of the whole gradient before clipping.
        lr: learning rate.
        tokens: tokens in the batch, padding included.
        target_tokens: of them, those that count in the loss.
        seconds: wall time.
        skipped: why it changed no state (a loss or gradient that is not finite), or None.
        clipped: whether the gradient was scaled down.
        loss_scale: what its loss was multiplied by before the backward (float16), or None.
        ssd_read_bytes, ssd_write_bytes: moved by the store.
        host_peak_bytes: most memory the process has had so far.
        events: when each operation ran.
        schedule: what the events are of.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    target_tokens: int
    seconds: float
    skipped: str | None
    clipped: bool
    loss_scale: float | None
    ssd_read_bytes: int
    ssd_write_bytes: int
    host_peak_bytes: int
    events: tuple[OperationEvent, ...]
    schedule: Schedule | None = None
