"""The work of a step, phase by phase, as expressions of the shares that the linear program chooses.

A step has a forward and a backward phase; between them, where its micro-batches go in several groups, the backward of
the first group up to the forward of the last; and, where updates wait for the gradient's norm, an end in which they run
alone.
"""

from dataclasses import KW_ONLY, dataclass, field, fields, replace

from greedysnake.plan.costs import GRADIENT_ITEM_BYTES, StepCosts
from greedysnake.schedule import StepShape

PHASES = ("forward", "between", "backward", "end")


class Expression:
    """A constant and coefficients of variables."""

    def __init__(self, constant: float = 0.0, **coefficients: float) -> None:
        self.constant = constant
        self.coefficients = coefficients

    def __add__(self, other: "Expression") -> "Expression":
        merged = dict(self.coefficients)
        for name, value in other.coefficients.items():
            merged[name] = merged.get(name, 0.0) + value
        return Expression(self.constant + other.constant, **merged)

    def __mul__(self, factor: float) -> "Expression":
        return Expression(self.constant * factor, **{name: value * factor for name, value in self.coefficients.items()})

    def at(self, shares: dict[str, float]) -> float:
        """Its value for given shares."""
        return self.constant + sum(value * shares[name] for name, value in self.coefficients.items())


_STREAMED_WEIGHTS = Expression(1.0, resident_weights=-1.0)
_GRADIENTS_ON_SSD = Expression(1.0, gradients_host=-1.0)


@dataclass(frozen=True, kw_only=True)
class PhaseWork:
    """What happens in a phase, as expressions of the shares.

    Attributes:
        ssd_read, ssd_write, h2d, d2h: bytes.
        compute, cpu: seconds, each alone.
    """

    ssd_read: Expression = field(default_factory=Expression)
    ssd_write: Expression = field(default_factory=Expression)
    h2d: Expression = field(default_factory=Expression)
    d2h: Expression = field(default_factory=Expression)
    compute: Expression = field(default_factory=Expression)
    cpu: Expression = field(default_factory=Expression)

    def __add__(self, other: "PhaseWork") -> "PhaseWork":
        return PhaseWork(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __mul__(self, factor: float) -> "PhaseWork":
        return PhaseWork(**{one.name: getattr(self, one.name) * factor for one in fields(self)})


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sizes of a step, summed over its units.

    Attributes:
        weights, state, gradients: bytes of what is trained.
        all_weights: bytes, frozen ones included.
        forward_weights, backward_weights: bytes of weights that the phases need in host memory.
        copied_weights: bytes of weights that computation in the backward phase needs.
        boundaries: bytes that are kept from forward to backward.
        kept: bytes of all activations inside of decoder units, if none are recomputed.
    """

    weights: float
    all_weights: float
    state: float
    gradients: float
    forward_weights: float
    backward_weights: float
    copied_weights: float
    boundaries: float
    kept: float


def step_totals(shape: StepShape, *, updates_in_backward: bool) -> StepTotals:
    """Sum up a step's sizes.

    Args:
        shape: of the step.
        updates_in_backward: whether the backward phase updates anything, and so needs every unit's weights.
    """
    head = len(shape.units) - 1
    chunks = [chunk for unit in shape.units for chunk in unit.chunks]
    passed = shape.units[shape.first_trained : head]  # what the backward comes through
    again = [unit for unit in passed if unit.backward_needs_weights or (updates_in_backward and unit.chunks)]
    computed = [unit for unit in passed if unit.backward_needs_weights]
    at_head = shape.units[head].weight_bytes + (shape.units[0].weight_bytes if shape.tied else 0)
    return StepTotals(
        weights=sum(chunk.weight_bytes for chunk in chunks),
        all_weights=sum(unit.weight_bytes for unit in shape.units),
        state=sum(chunk.state_bytes for chunk in chunks),
        gradients=sum(chunk.gradient_bytes for chunk in chunks),
        forward_weights=sum(unit.weight_bytes for unit in shape.units[:head]),
        backward_weights=sum(unit.weight_bytes for unit in again) + at_head,
        copied_weights=sum(unit.weight_bytes for unit in computed) + at_head,
        boundaries=max(0, head - max(1, shape.first_trained)) * shape.micro_batches * shape.boundary_bytes,
        kept=len(shape.keepers) * shape.micro_batches * shape.kept_bytes,
    )


def phase_work(
    shape: StepShape,
    costs: StepCosts,
    *,
    delayed_share: float,
    wait_for_norm: bool,
    separate_device: bool,
    groups: int = 1,
    snapshots: float = 0.0,
) -> dict[str, PhaseWork]:
    """The work of each phase of a vertical step.

    Args:
        shape: of the step.
        costs: of its operations.
        delayed_share, wait_for_norm, separate_device: of the plan.
        groups: of micro-batches, which go forward and backward one after the other.
        snapshots: taken in a step, on average: what stays in host memory is written for each, in the forward.
    """
    alpha, prompt = delayed_share, 1 - delayed_share
    in_backward = 0.0 if wait_for_norm else prompt
    at_end = prompt if wait_for_norm else 0.0
    sizes = step_totals(shape, updates_in_backward=in_backward > 0)
    works = _GroupWork(shape, costs, sizes, separate_device=separate_device, share=1 / groups)
    forward = works.forward() + works.update(alpha, gradients=alpha)
    forward += PhaseWork(ssd_write=Expression(resident_weights=sizes.weights, resident_state=sizes.state) * snapshots)
    backward = works.backward(sizes.backward_weights) + works.update(in_backward)
    backward += works.held(1.0 if wait_for_norm else alpha) + works.norm()
    between = PhaseWork()
    if groups > 1:
        between = (works.forward() + works.backward(sizes.copied_weights)) * (groups - 1)
        between += works.held(1.0) * (groups - 1) + works.resumed() * (groups - 2)
        backward += works.resumed()
    # a unit's weights come whole, whatever part of them is updated
    updated_units = sum(unit.weight_bytes for unit in shape.units if unit.chunks)
    end = works.update(at_end, gradients=at_end, weights=updated_units if at_end else 0.0)
    lost = costs.contention.transfer
    forward, between, backward = (
        replace(phase, compute=phase.compute + (phase.ssd_read + phase.ssd_write) * lost)
        for phase in (forward, between, backward)
    )
    return {"forward": forward, "between": between, "backward": backward, "end": end}


@dataclass(frozen=True)
class _GroupWork:
    """The work of one group of micro-batches, in parts.

    Attributes:
        shape, costs, sizes: of the step.
        separate_device: whether the device has memory of its own.
        share: the group's part of all micro-batches.
    """

    shape: StepShape
    costs: StepCosts
    sizes: StepTotals
    _: KW_ONLY
    separate_device: bool
    share: float

    def forward(self) -> PhaseWork:
        """Its forward, without the delayed updates."""
        micro_batches, seconds = self.share * self.shape.micro_batches, self.costs.units
        keepers = [seconds[unit] for unit in self.shape.keepers]
        kept = micro_batches * sum(unit.forward_if(kept=True) - unit.forward for unit in keepers)
        compute = Expression(micro_batches * sum(unit.forward for unit in seconds[:-1]), kept_activations=kept)
        work = PhaseWork(
            ssd_read=_STREAMED_WEIGHTS * self.sizes.forward_weights, ssd_write=self._on_ssd(), compute=compute
        )
        if not self.separate_device:
            return replace(work, cpu=self._on_ssd() * (1 / self.costs.copy))
        return replace(work, h2d=Expression(self.sizes.forward_weights), d2h=self._leaving())

    def backward(self, weights: float) -> PhaseWork:
        """Its backward, for which ``weights`` bytes are needed in host memory, without the prompt updates."""
        micro_batches, seconds = self.share * self.shape.micro_batches, self.costs.units
        keepers = [seconds[unit] for unit in self.shape.keepers]
        kept = micro_batches * sum(unit.backward_if(kept=True) - unit.backward for unit in keepers)
        computing = micro_batches * sum(unit.backward for unit in seconds[self.shape.first_trained :])
        zeros = self.share * self.sizes.gradients / self.costs.device_fill
        work = PhaseWork(
            ssd_read=_STREAMED_WEIGHTS * weights + self._on_ssd(),
            compute=Expression(computing + zeros, kept_activations=kept),
        )
        if not self.separate_device:
            return replace(work, cpu=self._on_ssd() * (1 / self.costs.copy))
        return replace(
            work,
            h2d=Expression(self.sizes.copied_weights) + self._leaving(),
            d2h=Expression(self.sizes.gradients),
        )

    def update(self, share: float, *, gradients: float = 0.0, weights: float = 0.0) -> PhaseWork:
        """The updates of a share of all chunks, with the reads of a share of the gradients and of ``weights`` bytes."""
        sizes = self.sizes
        state = Expression(1.0, resident_state=-1.0) * (share * sizes.state)
        return PhaseWork(
            ssd_read=state + _GRADIENTS_ON_SSD * (gradients * sizes.gradients) + _STREAMED_WEIGHTS * weights,
            ssd_write=state + _STREAMED_WEIGHTS * (share * sizes.weights),
            cpu=Expression(share * sizes.gradients / GRADIENT_ITEM_BYTES / self.costs.optimizer),
        )

    def held(self, share: float) -> PhaseWork:
        """A share of the gradients put away."""
        size = share * self.sizes.gradients
        return PhaseWork(
            ssd_write=_GRADIENTS_ON_SSD * size, cpu=Expression(gradients_host=1.0) * (size / self.costs.copy)
        )

    def resumed(self) -> PhaseWork:
        """All gradients brought back, for the next group to add to."""
        size = self.sizes.gradients
        work = PhaseWork(
            ssd_read=_GRADIENTS_ON_SSD * size, cpu=Expression(gradients_host=1.0) * (size / self.costs.copy)
        )
        return replace(work, h2d=Expression(size)) if self.separate_device else work

    def norm(self) -> PhaseWork:
        """The norm of the whole gradient, which a copy's rate bounds, as it only reads."""
        return PhaseWork(cpu=Expression(0.5 * self.sizes.gradients / self.costs.copy))

    def _on_ssd(self) -> Expression:
        """Bytes of its boundaries that wait on SSD."""
        return Expression(1.0, boundaries_device=-1.0, boundaries_host=-1.0) * (self.share * self.sizes.boundaries)

    def _leaving(self) -> Expression:
        """Bytes of its boundaries that leave the device."""
        return Expression(1.0, boundaries_device=-1.0) * (self.share * self.sizes.boundaries)
