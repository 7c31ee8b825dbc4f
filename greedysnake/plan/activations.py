"""Memory that torch needs while it computes one unit for one micro-batch: an estimate from shapes.

Every weight matrix is taken to keep its input and its output, and elementwise operations to keep as
much again. Parameters' gradients come as whole tensors before they are added to the flat buffer.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from greedysnake.models.skeleton import Skeleton


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a step's batch.

    Attributes:
        micro_batches: M.
        rows: sequences in the largest micro-batch, B.
        tokens: tokens in the longest sequence, T.
        mask_bytes: attention masks that a micro-batch keeps while it waits for its turn.
    """

    micro_batches: int
    rows: int
    tokens: int
    mask_bytes: int = 0


def boundary_bytes(skeleton: Skeleton, batch: BatchShape) -> int:
    """Bytes of the activation between two units for one micro-batch: [B, T, hidden]."""
    config = skeleton.model.config.get_text_config()
    return batch.rows * batch.tokens * int(config.hidden_size) * _itemsize(skeleton)


def unit_activation_bytes(skeleton: Skeleton, batch: BatchShape) -> int:
    """Most bytes that the recompute and backward of a decoder unit hold at once."""
    most = max(_layer_bytes(skeleton, unit, batch) for unit in range(1, len(skeleton.layouts) - 1))
    return most + _largest_gradient(skeleton)


def head_activation_bytes(skeleton: Skeleton, batch: BatchShape) -> int:
    """Most bytes of one micro-batch's logits, their float32 copy, log-probabilities and gradients."""
    vocabulary = int(skeleton.model.config.get_text_config().vocab_size)
    logits = batch.rows * batch.tokens * vocabulary
    copies = 12 if _itemsize(skeleton) == 4 else 3 * 4 + 2 * _itemsize(skeleton)
    return logits * copies + _largest_gradient(skeleton)


def _layer_bytes(skeleton: Skeleton, unit: int, batch: BatchShape) -> int:
    config = skeleton.model.config.get_text_config()
    experts_used = int(getattr(config, "num_experts_per_tok", None) or 1)
    size, tokens = _itemsize(skeleton), batch.rows * batch.tokens
    features = 0
    for slot in skeleton.layouts[unit].parameters:
        if len(slot.shape) == 2:
            features += sum(slot.shape)
        elif len(slot.shape) == 3:  # experts in one tensor
            features += experts_used * sum(slot.shape[1:])
    layers = len(skeleton.unit_layers[unit])
    total = 3 * features * tokens * size + 48 * layers * tokens * int(config.hidden_size)
    heads = _attention_heads(config)
    return total + layers * batch.rows * heads * batch.tokens**2 * _attention_matrix_bytes(config)


def _attention_heads(config: PretrainedConfig) -> int:
    """Attention heads of a layer; the most of any where layers differ."""
    layers = getattr(config, "per_layer_config", None)
    if not layers:
        return int(getattr(config, "num_attention_heads", 1))
    own = layers.values() if isinstance(layers, dict) else layers
    return max(int(getattr(layer, "num_attention_heads", 1)) for layer in own)


def _attention_matrix_bytes(config: PretrainedConfig) -> int:
    """Bytes for each entry of the attention weights [B, heads, T, T], where they are made at all.

    They are by eager attention, by dropout on them, and, with more copies, where biases are added to them.
    """
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return 48
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
    eager = config._attn_implementation == "eager"  # transformers keeps the choice in this field only
    return 24 if eager or any(getattr(config, name, 0) for name in names) else 0


def paused_bytes(skeleton: Skeleton, batch: BatchShape) -> int:
    """Attention masks of the paused micro-batches, and what the allocator keeps of memory that they gave back.

    The C library gives blocks of more than 32 MiB back to the kernel at once, smaller ones not always: measured.
    """
    logits = 4 * batch.rows * batch.tokens * int(skeleton.model.config.get_text_config().vocab_size)
    kept = logits if logits <= 32 * 2**20 else 0
    return batch.micro_batches * (16 * 2**20 + kept + batch.mask_bytes)


def _largest_gradient(skeleton: Skeleton) -> int:
    """A parameter's gradient in its own dtype, and in float32 where that is another."""
    return max(
        slot.elements * (4 if slot.dtype == torch.float32 else slot.dtype.itemsize + 4)
        for layout in skeleton.layouts
        for slot in layout.parameters
    )


def _itemsize(skeleton: Skeleton) -> int:
    return int(skeleton.model.dtype.itemsize)
