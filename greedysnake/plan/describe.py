"""The workload of a model: built on the meta device, where nothing is computed and no weight exists."""

from collections.abc import Iterable, Sequence
from functools import cache, partial

import torch
from transformers import PretrainedConfig

from greedysnake.models.layout import ParameterSlot
from greedysnake.models.lora import Lora
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.plan.kept import layer_saved_bytes
from greedysnake.plan.model_sizes import activation_sizes
from greedysnake.plan.workload import PartSizes, Workload
from greedysnake.schedule import ChunkShape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def describe_model(
    config: PretrainedConfig,
    *,
    dtype: str = "bfloat16",
    name: str | None = None,
    split_master: bool = True,
    freeze: Sequence[str] = (),
    lora: Lora | None = None,
) -> Workload:
    """Sizes and operations of the model of a transformers config.

    Args:
        config: of the model.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        name: what to call it; None for its type.
        split_master: whether bfloat16 weights are the upper halves of their masters.
        freeze: patterns over names of parameters that are not trained.
        lora: adapters that are trained instead of the model's own parameters.

    Raises:
        ModelError: the model cannot be built, or not be run layer by layer.
        ConfigError: a pattern or the adapters do not fit the model.
    """
    skeleton = build_skeleton(config, dtype=DTYPES[dtype], split_master=split_master, freeze=freeze, lora=lora)
    return describe_skeleton(skeleton, dtype=dtype, name=name)


def describe_skeleton(skeleton: Skeleton, *, dtype: str, name: str | None = None) -> Workload:
    """The same for a model that was built already, a decoder layer a unit."""
    structure = skeleton.structure
    chunks = {chunk.elements: chunk for layout in skeleton.layouts for chunk in layout.chunks}
    largest = chunks[max(chunks)]
    return Workload(
        name=name or str(skeleton.model.config.model_type),
        dtype=dtype,
        parts=tuple(_part(skeleton, unit) for unit in range(len(skeleton.layouts))),
        tied=structure.tied,
        split_master=all(chunk.split_master for chunk in chunks.values()),
        embedding_backward_needs_weights=structure.embedding_backward_needs_weights,
        largest_chunk=ChunkShape(
            weight_bytes=largest.weight_bytes, state_bytes=largest.state_bytes, gradient_bytes=4 * largest.elements
        ),
        activations=activation_sizes(skeleton),
        saved_bytes=cache(partial(layer_saved_bytes, skeleton)),
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
        frozen_parameters=sum(slot.elements for slot in frozen),
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
