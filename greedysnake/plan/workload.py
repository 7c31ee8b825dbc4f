"""What a model asks of a machine: parameters, bytes and floating-point operations of every unit.

Operations are counted as in appendix B of the PaLM paper (arXiv 2204.02311): a matrix of P weights costs 2 P a token in
the forward, and the attention of one layer 4 T times the width of all its query heads, T being the sequence; a backward
costs twice its forward. Summed up that is 6 N + 12 L H Q T a token for L layers of H heads of width Q. Recompute adds a
second forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greedysnake.plan.activations import (
    ActivationSizes,
    BatchShape,
    boundary_bytes,
    head_activation_bytes,
    kept_bytes,
    paused_bytes,
    planned_head_tokens,
    unit_activation_bytes,
)
from greedysnake.schedule import ChunkShape, StepShape, UnitShape

MASTER_HALF_BYTES = 2
"""Of a parameter in bfloat16: what a whole float32 master beside the weight has more than a split one."""
MOMENT_BYTES = 8.0
"""Of a parameter: two float32 moments."""
EIGHT_BIT_MOMENT_BYTES = 2 + 2 * 4 / 256
"""Two moments of 8 bits, with a float32 scale for each block of 256 numbers, as bitsandbytes has them."""


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Sizes of the embedding, of one decoder layer, or of the head.

    Attributes:
        parameters: number of them, trained or not.
        weight_bytes, state_bytes, gradient_bytes: with padding, as they lie in the store.
        frozen_bytes: of the weights, those that are not trained.
        chunks: optimizer chunks of the default size.
        matrix_parameters: weights that a token is multiplied with; of experts, those that it is routed to.
        frozen_matrix_parameters: of these, those that are not trained: they need no gradient of their own.
        attention_width: query heads times their width; 0 where there is no attention.
        frozen_parameters: number of those that are not trained.
    """

    parameters: int
    weight_bytes: int
    frozen_bytes: int
    state_bytes: int
    gradient_bytes: int
    chunks: int
    matrix_parameters: float
    frozen_matrix_parameters: float
    attention_width: int
    frozen_parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class PartFlops:
    """Floating-point operations of one micro-batch in one unit.

    Attributes:
        forward: of the forward.
        backward: of recompute and backward; of the head, of its forward and backward together.
    """

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model to be trained.

    Attributes:
        name: what a person calls it.
        dtype: of weights and activations: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        parts: sizes of embedding, decoder layers and head.
        tied: whether the head uses the embedding's weights too.
        embedding_backward_needs_weights: whether the embedding's backward reads its weights.
        largest_chunk: the largest optimizer chunk that really moves, whatever a simulated schedule bundles.
        activations: what decides how much memory a micro-batch takes.
        saved_bytes: most bytes that a layer saves for the backward of one sequence of so many tokens.
        split_master: whether its state is that of weights that are the upper halves of their masters.
    """

    name: str
    dtype: str
    parts: tuple[PartSizes, ...]
    tied: bool
    embedding_backward_needs_weights: bool
    largest_chunk: ChunkShape
    activations: ActivationSizes
    saved_bytes: Callable[[int], int]
    split_master: bool = True

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(part.parameters for part in self.parts)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.parts) - 2

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.activations.hidden

    @property
    def vocabulary(self) -> int:
        """Rows of the output projection."""
        return self.activations.vocabulary

    def groups(self, layers_per_unit: int) -> list[list[PartSizes]]:
        """The parts of each unit."""
        inner = self.parts[1:-1]
        layers = [list(inner[i : i + layers_per_unit]) for i in range(0, len(inner), layers_per_unit)]
        return [[self.parts[0]], *layers, [self.parts[-1]]]

    def step_shape(
        self,
        batch: BatchShape,
        *,
        layers_per_unit: int = 1,
        chunks_per_unit: int = 16,
        split_master: bool = True,
        eight_bit_moments: bool = False,
    ) -> StepShape:
        """The sizes that a schedule is built from.

        Args:
            batch: sizes of the batch.
            layers_per_unit: decoder layers loaded and computed as one.
            chunks_per_unit: most optimizer chunks of a unit. A large model has tens of thousands; schedules that
                are only simulated take several together, which costs a little overlap and no bytes.
            split_master: False counts whole masters beside bfloat16 weights, also where the model has split ones.
            eight_bit_moments: whether the optimizer's moments have 8 bits, which this engine's do not.
        """
        whole = self.split_master and not split_master and self.dtype == "bfloat16"
        added = float(MASTER_HALF_BYTES) if whole else 0.0
        if eight_bit_moments:
            added += EIGHT_BIT_MOMENT_BYTES - MOMENT_BYTES
        built: dict[tuple[bool, tuple[PartSizes, ...]], UnitShape] = {}  # most layers are alike
        units = []
        for number, group in enumerate(self.groups(layers_per_unit)):
            key = (number > 0, tuple(group))
            if key in built:
                units.append(built[key])
                continue
            state = sum(part.state_bytes + round(added * part.gradient_bytes / 4) for part in group)
            count = min(chunks_per_unit, sum(part.chunks for part in group))
            frozen = sum(part.frozen_bytes for part in group)
            weights = _split(sum(part.weight_bytes for part in group) - frozen, count)
            gradients = _split(sum(part.gradient_bytes for part in group), count)
            built[key] = UnitShape(
                chunks=tuple(
                    ChunkShape(weight_bytes=w, state_bytes=s, gradient_bytes=g)
                    for w, s, g in zip(weights, _split(state, count), gradients, strict=True)
                ),
                frozen_weight_bytes=frozen,
                backward_needs_weights=number > 0 or self.embedding_backward_needs_weights,
            )
            units.append(built[key])
        return StepShape(
            units=tuple(units),
            micro_batches=batch.micro_batches,
            boundary_bytes=self.boundary_bytes(batch),
            kept_bytes=kept_bytes(self.saved_bytes(batch.tokens), layers=layers_per_unit, rows=batch.rows),
            tied=self.tied,
        )

    def flops(self, batch: BatchShape, *, layers_per_unit: int = 1) -> list[PartFlops]:
        """Operations of each unit for one micro-batch."""
        tokens = batch.rows * batch.tokens
        found = []
        for group in self.groups(layers_per_unit):
            forward = tokens * sum(
                2 * part.matrix_parameters + 4 * batch.tokens * part.attention_width for part in group
            )
            spared = tokens * sum(2 * part.frozen_matrix_parameters for part in group)
            found.append(PartFlops(forward=forward, backward=3 * forward - spared))
        return found

    def model_flops_per_token(self, tokens: int) -> float:
        """Operations that training needs a token of a sequence of ``tokens``, without recompute: 6 N + 12 L H Q T."""
        return 3 * sum(2 * part.matrix_parameters + 4 * tokens * part.attention_width for part in self.parts)

    def boundary_bytes(self, batch: BatchShape) -> int:
        """Bytes of the activation between two units for one micro-batch."""
        return boundary_bytes(self.activations, batch)

    def computing_bytes(self, batch: BatchShape, *, layers_per_unit: int = 1, separate_device: bool = False) -> int:
        """Memory that torch needs at once while it computes, besides the schedule's buffers."""
        layers = layers_per_unit * unit_activation_bytes(self.activations, batch)
        head_tokens = planned_head_tokens(self.activations, batch)
        most = max(layers, head_activation_bytes(self.activations, batch, head_tokens))
        return most if separate_device else most + paused_bytes(self.activations, batch, head_tokens)


def _split(total: int, parts: int) -> Sequence[int]:
    """``total`` in ``parts`` near-equal whole numbers."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]
