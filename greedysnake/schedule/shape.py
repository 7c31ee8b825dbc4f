"""What a schedule is built from: sizes of the model's units, and the choices of the plan."""

from dataclasses import dataclass
from functools import cached_property
from math import floor

from greedysnake.schedule.operations import Tier


@dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """Bytes of one optimizer chunk: a run of parameters that is updated as one.

    Attributes:
        weight_bytes: its weights.
        state_bytes: master remainder (or nothing, in float32) and both Adam moments.
        gradient_bytes: its float32 gradient.
    """

    weight_bytes: int
    state_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """Sizes of a unit; the unit's weights and gradients are those of its chunks, end to end.

    Attributes:
        chunks: its optimizer chunks.
        frozen_weight_bytes: weights that no optimizer updates.
        backward_needs_weights: whether its backward reads its weights (an embedding's does not).
    """

    chunks: tuple[ChunkShape, ...]
    frozen_weight_bytes: int = 0
    backward_needs_weights: bool = True

    @property
    def weight_bytes(self) -> int:
        """Bytes of the unit's weights."""
        return self.frozen_weight_bytes + sum(chunk.weight_bytes for chunk in self.chunks)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unit's float32 gradient."""
        return sum(chunk.gradient_bytes for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step's sizes.

    Attributes:
        units: embedding, decoder units, head.
        micro_batches: M.
        boundary_bytes: the activation between two units for one micro-batch.
        kept_bytes: what a decoder unit's backward needs of its forward for one micro-batch, where it is kept.
        tied: whether the head uses the embedding's weights too.
    """

    units: tuple[UnitShape, ...]
    micro_batches: int
    boundary_bytes: int
    kept_bytes: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        if len(self.units) < 3:
            raise ValueError(
                f"a step has an embedding, at least one decoder unit and a head; got {len(self.units)} units"
            )
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, got {self.micro_batches}")

    @cached_property
    def first_trained(self) -> int:
        """The first unit that has anything to train: no gradient is needed before it."""
        return next((unit for unit, sizes in enumerate(self.units) if sizes.chunks), len(self.units) - 1)

    @cached_property
    def keepers(self) -> range:
        """Units whose activations could be kept for the backward: the decoder units that it comes through."""
        return range(max(1, self.first_trained), len(self.units) - 1)

    @property
    def tied_gradient(self) -> bool:
        """Whether the head adds to the embedding's gradient."""
        return self.tied and bool(self.units[0].chunks)


SHARES = (
    "delayed_share",
    "resident_weights",
    "resident_state",
    "boundaries_on_device",
    "boundaries_on_ssd",
    "kept_activations",
)
"""Of the choices, those that are parts of a whole, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the plan decided about a step.

    Attributes:
        delayed_share: α, the part of each unit's chunks that is updated in the next step's forward.
        wait_for_norm: whether no chunk may be updated before the whole gradient's norm is known (clipping).
        separate_device: whether computation has memory of its own, so that weights, gradients and boundaries are
            copied between it and host memory.
        boundaries_on_device, boundaries_on_ssd: shares of the boundaries that wait for the backward there; the rest
            waits in host memory. The device keeps some only if it is separate.
        boundaries_first: whether updates behind the backward make way for boundaries that come from SSD.
        kept_activations: the part of all pairs of a decoder unit and a micro-batch whose activations are kept where
            they were computed from the forward to the backward; those of the others are recomputed.
        gradients: the tier that keeps gradients until their update, host or ssd.
        group_size: micro-batches that go through each unit together before the next ones begin; None: all of them.
        snake: whether every other unit takes the micro-batches in reverse.
        overlap: whether operations of different resources run at the same time; False is for comparison.
        resident_weights: the part of all units whose weights stay in host memory.
        resident_state: the part of each unit's chunks whose state stays in host memory.
        weight_slots, gradient_slots, state_slots: buffers of each kind; they bound how far I/O may run ahead.
    """

    delayed_share: float = 0.0
    wait_for_norm: bool = False
    separate_device: bool = False
    boundaries_on_device: float = 0.0
    boundaries_on_ssd: float = 0.0
    boundaries_first: bool = True
    kept_activations: float = 0.0
    gradients: Tier = Tier.HOST
    group_size: int | None = None
    snake: bool = True
    overlap: bool = True
    resident_weights: float = 0.0
    resident_state: float = 0.0
    weight_slots: int = 2
    gradient_slots: int = 1
    state_slots: int = 2

    def __post_init__(self) -> None:
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("weight_slots", "gradient_slots", "state_slots", "group_size"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if self.gradients not in (Tier.HOST, Tier.SSD):
            raise ValueError(f"gradients must wait in host or ssd, got {self.gradients}")
        if self.boundaries_on_device and not self.separate_device:
            raise ValueError("boundaries can only stay on the device where the device has memory of its own")
        if self.boundaries_on_device + self.boundaries_on_ssd > 1 + 1e-9:
            raise ValueError(
                f"boundaries_on_device and boundaries_on_ssd are shares of one whole, got "
                f"{self.boundaries_on_device} and {self.boundaries_on_ssd}"
            )

    @property
    def compute_tier(self) -> Tier:
        """Where computation has its memory."""
        return Tier.DEVICE if self.separate_device else Tier.HOST

    def boundary_tier(self, unit: int, units: int) -> Tier:
        """Where a unit's outputs wait for the backward; each share is spread evenly over the model.

        The input of the last of the ``units``, the head, is used at once and stays where it is.
        """
        if unit >= units - 2:
            return self.compute_tier
        if _in_share(self.boundaries_on_ssd, unit):
            return Tier.SSD
        others = unit - _share_before(self.boundaries_on_ssd, unit)
        rest = 1 - self.boundaries_on_ssd
        on_device = rest > 0 and _in_share(min(1.0, self.boundaries_on_device / rest), others)
        return Tier.DEVICE if on_device else Tier.HOST

    def boundary_leaves(self, unit: int, units: int) -> bool:
        """Whether a unit's outputs leave the memory that they were computed in until the backward."""
        return self.boundary_tier(unit, units) != self.compute_tier

    @property
    def boundaries_leave(self) -> bool:
        """Whether any boundaries leave the memory that they were computed in until the backward."""
        return self.boundaries_on_ssd > 0 or (self.separate_device and self.boundaries_on_device < 1)

    def together(self, shape: StepShape) -> int:
        """How many micro-batches go through a unit together; the last group of a step may have fewer."""
        return min(self.group_size or shape.micro_batches, shape.micro_batches)

    def groups(self, shape: StepShape) -> list[range]:
        """The micro-batches of each group, which go forward and backward before those of the next."""
        size, count = self.together(shape), shape.micro_batches
        return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def kept_at_once(self, shape: StepShape) -> int:
        """How many pairs of a unit and a micro-batch of a group keep their activations."""
        return round(self.kept_activations * len(shape.keepers) * self.together(shape))

    def kept_count(self, shape: StepShape) -> int:
        """The same of all groups."""
        units, rest = divmod(self.kept_at_once(shape), self.together(shape))
        return units * shape.micro_batches + sum(min(rest, len(group)) for group in self.groups(shape))

    def keeps(self, unit: int, micro_batch: int, shape: StepShape) -> bool:
        """Whether a unit's activations of a micro-batch are kept: the last units', which the backward frees first."""
        after, size = shape.keepers.stop - 1 - unit, self.together(shape)
        return unit in shape.keepers and after * size + micro_batch % size < self.kept_at_once(shape)

    def weights_resident(self, unit: int) -> bool:
        """Whether a unit's weights stay in host memory; those that do are spread evenly over the model."""
        return _in_share(self.resident_weights, unit)

    def state_resident(self, chunk: int, chunks: int) -> bool:
        """Whether the state of a unit's chunk stays in host memory; the first of its ``chunks`` do."""
        return chunk < round(self.resident_state * chunks)

    def first_delayed(self, chunks: int) -> int:
        """Index of a unit's first delayed chunk: the last α of its chunks are, to the nearest whole chunk."""
        return chunks - round(self.delayed_share * chunks)

    def delayed_chunks(self, unit: UnitShape) -> range:
        """Chunks of ``unit`` whose update is delayed into the next step."""
        return range(self.first_delayed(len(unit.chunks)), len(unit.chunks))

    def prompt_chunks(self, unit: UnitShape) -> range:
        """Chunks of ``unit`` that are updated in the step that computed their gradient."""
        return range(self.first_delayed(len(unit.chunks)))


def _share_before(share: float, index: int) -> int:
    """How many of the first ``index`` things belong to a share of all that is spread evenly."""
    return floor(index * share + 1e-9)


def _in_share(share: float, index: int) -> bool:
    """Whether a thing belongs to a share of all that is spread evenly."""
    return _share_before(share, index + 1) > _share_before(share, index)
