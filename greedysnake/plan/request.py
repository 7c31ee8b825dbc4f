"""What a training run asks of its plan."""

from dataclasses import dataclass

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.hardware import Hardware
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.workload import Workload
from greedysnake.schedule import Tier


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user fixed; None leaves it to the plan.

    Attributes:
        hardware: the machine's figures; None where they are not known.
        schedule: ``"vertical"`` or ``"horizontal"``.
        layers_per_unit: decoder layers loaded and computed as one.
        group_size: micro-batches that go through the units together, before the next ones begin.
        delayed_share: α.
        snake: whether every other unit takes the micro-batches in reverse.
        overlap: whether operations of different resources run at the same time.
        boundaries_on_device, boundaries_on_ssd: shares of the boundaries that wait for the backward there.
        kept_activations: share of the activations that are kept for the backward instead of being recomputed.
        gradients: tier.
        host_memory: bytes that the process may use.
        separate_device: whether computation has memory of its own.
        device_memory: bytes of it that may be used, None for no limit.
        clipping: whether the gradient's norm is limited.
        can_take_back: whether what a step wrote can be taken back while its norm is not known.
        resident_weights, resident_state: shares that stay in host memory; None: as much as helps and fits.
        snapshot_every: steps between snapshots.
        head_chunk_tokens: tokens of a micro-batch whose logits exist at once; None: planned.
        configured_memory: bytes that computation is told to use, whatever is free; None: not told.
    """

    hardware: Hardware | None = None
    schedule: str = "vertical"
    layers_per_unit: int | None = None
    group_size: int | None = None
    delayed_share: float | None = None
    snake: bool = True
    overlap: bool = True
    boundaries_on_device: float | None = None
    boundaries_on_ssd: float | None = None
    kept_activations: float | None = None
    gradients: Tier | None = None
    host_memory: int | None = None
    separate_device: bool = False
    device_memory: int | None = None
    clipping: bool = False
    can_take_back: bool = True
    resident_weights: float | None = 0.0
    resident_state: float | None = 0.0
    snapshot_every: int = 1
    head_chunk_tokens: int | None = None
    configured_memory: int | None = None

    def query(self, workload: Workload, hardware: Hardware, batch: BatchShape) -> PlanQuery:
        """The same asked of the planner.

        Args:
            workload: the model.
            hardware: the machine, with no more memory and disk than the run may use.
            batch: sizes of the step's batch.
        """
        return PlanQuery(
            workload=workload,
            hardware=hardware,
            tokens=batch.tokens,
            sequences=batch.micro_batches * batch.rows,
            micro_batches=batch.micro_batches,
            rows=batch.rows,
            layers_per_unit=self.layers_per_unit,
            group_size=self.group_size,
            delayed_share=self.delayed_share,
            boundaries_on_device=self.boundaries_on_device,
            boundaries_on_ssd=self.boundaries_on_ssd,
            kept_activations=self.kept_activations,
            gradients=self.gradients,
            resident_weights=self.resident_weights,
            resident_state=self.resident_state,
            clipping=self.clipping,
            can_take_back=self.can_take_back,
            snapshot_every=self.snapshot_every,
            schedule=self.schedule,
            overlap=self.overlap,
            mask_bytes=batch.mask_bytes,
        )
