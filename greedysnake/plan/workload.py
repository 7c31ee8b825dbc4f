"""What a model asks of a machine: parameters, bytes and floating-point operations of every unit.

Nothing is computed and no weight exists: the model is built on the meta device. Operations are counted as in
appendix B of the PaLM paper (arXiv 2204.02311): a matrix of P weights costs 2 P a token in the forward, and
the attention of one layer 4 T times the width of all its query heads, T being the sequence; a backward costs
twice its forward. Summed up that is 6 N + 12 L H Q T a token for L layers of H heads of width Q. Recompute
adds a second forward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PretrainedConfig

from greedysnake.models.layout import ParameterSlot
from greedysnake.models.lora import Lora
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.plan.activations import (
    BatchShape,
    boundary_bytes,
    head_activation_bytes,
    paused_bytes,
    planned_head_tokens,
    unit_activation_bytes,
)
from greedysnake.plan.kept import layer_kept_bytes
from greedysnake.schedule import ChunkShape, StepShape, UnitShape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SPLIT_STATE_BYTES = 10
"""Bytes of state of a parameter in 16 bits: 16-bit remainder of the master weight and two float32 moments."""
WHOLE_STATE_BYTES = 12
"""The same with a whole float32 master beside the 16-bit weight, as other systems keep it."""


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
        dtype: of weights and activations.
        skeleton: the model without weights, a decoder layer a unit.
        distinct: the same with one layer of each kind, for estimates that look at all layers.
        parts: sizes of embedding, decoder layers and head.
        vocabulary: rows of the output projection.
    """

    name: str
    dtype: str
    skeleton: Skeleton
    distinct: Skeleton
    parts: tuple[PartSizes, ...]
    vocabulary: int

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
        return int(self.skeleton.model.config.get_text_config().hidden_size)

    def groups(self, layers_per_unit: int) -> list[list[PartSizes]]:
        """The parts of each unit."""
        inner = self.parts[1:-1]
        layers = [list(inner[i : i + layers_per_unit]) for i in range(0, len(inner), layers_per_unit)]
        return [[self.parts[0]], *layers, [self.parts[-1]]]

    def step_shape(
        self, batch: BatchShape, *, layers_per_unit: int = 1, chunks_per_unit: int = 16, split_master: bool = True
    ) -> StepShape:
        """The sizes that a schedule is built from.

        Args:
            batch: sizes of the batch.
            layers_per_unit: decoder layers loaded and computed as one.
            chunks_per_unit: most optimizer chunks of a unit. A large model has tens of thousands; schedules that
                are only simulated take several together, which costs a little overlap and no bytes.
            split_master: whether a 16-bit weight is the upper half of its master.
        """
        built: dict[tuple[bool, tuple[PartSizes, ...]], UnitShape] = {}  # most layers are alike
        units = []
        for number, group in enumerate(self.groups(layers_per_unit)):
            key = (number > 0, tuple(group))
            if key in built:
                units.append(built[key])
                continue
            state = sum(part.state_bytes for part in group)
            if not split_master and self.dtype == "bfloat16":
                state = state * WHOLE_STATE_BYTES // SPLIT_STATE_BYTES
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
                backward_needs_weights=number > 0 or self.skeleton.structure.embedding_backward_needs_weights,
            )
            units.append(built[key])
        return StepShape(
            units=tuple(units),
            micro_batches=batch.micro_batches,
            boundary_bytes=self.boundary_bytes(batch),
            kept_bytes=layers_per_unit * batch.rows * self.kept_bytes(batch.tokens),
            tied=self.skeleton.structure.tied,
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
        return boundary_bytes(self.skeleton, batch)

    def kept_bytes(self, tokens: int) -> int:
        """Most bytes of a layer's activations, for one sequence, that a backward needs if they are not recomputed."""
        if tokens not in self._kept_bytes:
            self._kept_bytes[tokens] = layer_kept_bytes(self.skeleton, tokens)
        return self._kept_bytes[tokens]

    @cached_property
    def _kept_bytes(self) -> dict[int, int]:
        return {}

    def computing_bytes(self, batch: BatchShape, *, layers_per_unit: int = 1, separate_device: bool = False) -> int:
        """Memory that torch needs at once while it computes, besides the schedule's buffers."""
        layers = layers_per_unit * unit_activation_bytes(self.distinct, batch)
        head_tokens = planned_head_tokens(self.distinct, batch)
        most = max(layers, head_activation_bytes(self.distinct, batch, head_tokens))
        return most if separate_device else most + paused_bytes(self.distinct, batch, head_tokens)


def describe_model(
    config: PretrainedConfig,
    *,
    dtype: str = "bfloat16",
    name: str | None = None,
    freeze: Sequence[str] = (),
    lora: Lora | None = None,
) -> Workload:
    """Sizes and operations of the model of a transformers config.

    Args:
        config: of the model.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        name: what to call it; None for its type.
        freeze: patterns over names of parameters that are not trained.
        lora: adapters that are trained instead of the model's own parameters.

    Raises:
        ModelError: the model cannot be built, or not be run layer by layer.
        ConfigError: a pattern or the adapters do not fit the model.
    """
    skeleton = build_skeleton(config, dtype=DTYPES[dtype], freeze=freeze, lora=lora)
    return describe_skeleton(skeleton, dtype=dtype, name=name)


def describe_skeleton(skeleton: Skeleton, *, dtype: str, name: str | None = None) -> Workload:
    """The same for a model that was built already, a decoder layer a unit."""
    config = skeleton.model.config
    text = config.get_text_config()
    parts = [_part(skeleton, unit) for unit in range(len(skeleton.layouts))]
    return Workload(
        name=name or str(config.model_type),
        dtype=dtype,
        skeleton=skeleton,
        distinct=_one_of_each(skeleton),
        parts=tuple(parts),
        vocabulary=int(text.vocab_size),
    )


def _one_of_each(skeleton: Skeleton) -> Skeleton:
    """The skeleton with one layer for each set of parameter shapes."""
    kinds: dict[tuple[object, ...], int] = {}
    for unit in range(1, len(skeleton.layouts) - 1):
        kinds.setdefault(
            tuple((slot.shape, slot.dtype, slot.trainable) for slot in skeleton.layouts[unit].parameters), unit
        )
    units = (0, *kinds.values(), len(skeleton.layouts) - 1)
    return replace(
        skeleton,
        layouts=tuple(skeleton.layouts[unit] for unit in units),
        unit_layers=tuple(skeleton.unit_layers[unit] for unit in units),
    )


def _part(skeleton: Skeleton, unit: int) -> PartSizes:
    layout = skeleton.layouts[unit]
    config = skeleton.model.config.get_text_config()
    layers = len(skeleton.unit_layers[unit])
    last = len(skeleton.layouts) - 1
    experts_used = int(getattr(config, "num_experts_per_tok", None) or 1)
    matrices = 0.0 if unit == 0 else _matrix_parameters(layout.parameters, experts_used)
    frozen = [slot for slot in layout.parameters if not slot.trainable]
    frozen_matrices = 0.0 if unit == 0 else _matrix_parameters(frozen, experts_used)
    if unit == last and skeleton.structure.tied:
        projection = int(config.vocab_size) * int(config.hidden_size)
        matrices += projection
        frozen_matrices += 0 if skeleton.layouts[0].chunks else projection
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    width = int(getattr(config, "head_dim", None) or (int(config.hidden_size) // heads if heads else 0))
    return PartSizes(
        parameters=sum(slot.elements for slot in layout.parameters),
        weight_bytes=layout.weight_bytes,
        frozen_bytes=sum(chunk.weight_bytes for chunk in layout.frozen),
        state_bytes=sum(chunk.state_bytes for chunk in layout.chunks),
        gradient_bytes=4 * layout.gradient_elements,
        chunks=len(layout.chunks),
        matrix_parameters=matrices,
        frozen_matrix_parameters=frozen_matrices,
        attention_width=layers * heads * width,
    )


def _matrix_parameters(slots: Iterable[ParameterSlot], experts_used: int) -> float:
    """Weights that each token is multiplied with."""
    found = 0.0
    for slot in slots:
        if len(slot.shape) == 2:
            found += slot.elements
        elif len(slot.shape) == 3:  # experts in one tensor
            found += slot.elements / slot.shape[0] * min(experts_used, slot.shape[0])
    return found


def _split(total: int, parts: int) -> Sequence[int]:
    """``total`` in ``parts`` near-equal whole numbers."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def chunk_bytes(workload: Workload) -> ChunkShape:
    """Sizes of the largest optimizer chunk that really moves, whatever a simulated schedule bundles."""
    largest = max(
        (chunk for layout in workload.distinct.layouts for chunk in layout.chunks), key=lambda chunk: chunk.elements
    )
    return ChunkShape(
        weight_bytes=largest.weight_bytes, state_bytes=largest.state_bytes, gradient_bytes=4 * largest.elements
    )
