"""Memory that torch needs while it computes one unit for one micro-batch: an estimate from shapes.

Every weight matrix is taken to keep its input and its output, and elementwise operations to keep as
much again. Parameters' gradients come as whole tensors before they are added to the flat buffer, one at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from greedysnake.models.head_chunks import head_problem
from greedysnake.models.skeleton import Skeleton

LOGITS_BYTES = 2**30
"""What a micro-batch's logits and all that is computed from them may take before they are computed in parts."""

_BUDGET_PARTS = 8  # and no more than this part of the memory that a run is told to use
_FEWEST_TOKENS = 64  # in a part: smaller matrix products are slow


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
    """Most bytes that the recompute and backward of a decoder unit, or the embedding's backward, hold at once."""
    inner = range(1, len(skeleton.layouts) - 1)
    most = max(_layer_bytes(skeleton, unit, batch) + _largest_gradient(skeleton, [unit]) for unit in inner)
    return max(most, _largest_gradient(skeleton, [0]))


def layer_activation_bytes(skeleton: Skeleton, tokens: int) -> int:
    """Most bytes that the recompute and backward of a layer hold at once, for one sequence of ``tokens``."""
    batch = BatchShape(micro_batches=1, rows=1, tokens=tokens)
    units = range(1, len(skeleton.layouts) - 1)
    return max(_layer_bytes(skeleton, unit, batch) // len(skeleton.unit_layers[unit]) for unit in units)


def head_activation_bytes(skeleton: Skeleton, batch: BatchShape, chunk_tokens: int | None = None) -> int:
    """Most bytes of the logits that exist at once, their float32 copy, log-probabilities and gradients.

    Args:
        skeleton: the model.
        batch: sizes of the batch.
        chunk_tokens: tokens of a micro-batch whose logits exist at once; None: all.
    """
    tokens = batch.rows * batch.tokens
    config = skeleton.model.config.get_text_config()
    others = 12 * tokens * int(config.hidden_size)  # float32 copies of the last norm, of hidden states
    if chunk_tokens is not None and chunk_tokens < tokens:
        # one more position of each row than predicts something; hidden states and their gradient are kept meanwhile
        tokens = chunk_tokens + batch.rows
        others += 2 * boundary_bytes(skeleton, batch)
    # gradients of the parameters come when the loss's own memory is free and the logits' gradient is left
    gradient = tokens * int(config.vocab_size) * _itemsize(skeleton) + _head_gradient(skeleton)
    return others + max(tokens * _logits_bytes(skeleton), gradient)


def planned_head_tokens(skeleton: Skeleton, batch: BatchShape, budget: int | None = None) -> int | None:
    """Tokens of a micro-batch whose logits should exist at once; None: all, as they are few or cannot be parted.

    Depends on what is configured alone, not on what happens to be free: the parts decide the order of additions, and
    so the rounding, which must be the same when a run is resumed.

    Args:
        skeleton: the model.
        batch: sizes of the batch.
        budget: bytes of memory that computation is told to use; None: not told.
    """
    if head_problem(skeleton) is not None:
        return None
    allowed = max(LOGITS_BYTES, _head_gradient(skeleton))  # that gradient is there at the same time anyway
    if budget is not None:
        allowed = min(allowed, budget // _BUDGET_PARTS)
    tokens = batch.rows * batch.tokens
    if tokens * _logits_bytes(skeleton) <= allowed:
        return None
    fitting = allowed // _logits_bytes(skeleton) // _FEWEST_TOKENS * _FEWEST_TOKENS
    chunk = max(_FEWEST_TOKENS, batch.rows, fitting)
    return chunk if chunk < tokens else None


def _logits_bytes(skeleton: Skeleton) -> int:
    """Most bytes that the logits of a token take at once, with all that is computed from them.

    In any dtype: log-probabilities, their gradient and that of the logits, in float32. Measured: 12.0 bytes a logit.
    Logits that are capped by a tanh are kept for its backward, in their own dtype.
    """
    config = skeleton.model.config.get_text_config()
    capped = 3 * _itemsize(skeleton) if getattr(config, "final_logit_softcapping", None) else 0
    return int(config.vocab_size) * (3 * 4 + capped)


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


def inference_bytes(skeleton: Skeleton, *, rows: int, prompt_tokens: int, tokens: int) -> int:
    """Most bytes of activations without gradients, and of a key/value cache.

    Args:
        skeleton: the model.
        rows: sequences that go through it together.
        prompt_tokens: tokens in the longest prompt, which go through it at once.
        tokens: tokens in the longest sequence in the end.
    """
    config = skeleton.model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    width = int(getattr(config, "head_dim", None) or int(config.hidden_size) // heads)
    kept = int(getattr(config, "num_key_value_heads", None) or heads) * width
    layers = len(skeleton.structure.layers)
    cache = 2 * (layers + 1) * rows * tokens * kept * _itemsize(skeleton)  # one layer's is copied when it grows
    batch = BatchShape(micro_batches=1, rows=rows, tokens=prompt_tokens)
    computing = max(_layer_bytes(skeleton, unit, batch) for unit in range(1, len(skeleton.layouts) - 1))
    return cache + computing + 4 * 4 * rows * int(config.vocab_size)


def paused_bytes(skeleton: Skeleton, batch: BatchShape, chunk_tokens: int | None = None) -> int:
    """Attention masks of the paused micro-batches, and what the allocator keeps of memory that they gave back.

    The C library gives blocks of more than 32 MiB back to the kernel at once, smaller ones not always: measured.
    """
    tokens = min(batch.rows * batch.tokens, chunk_tokens or batch.rows * batch.tokens)
    logits = 4 * tokens * int(skeleton.model.config.get_text_config().vocab_size)
    kept = logits if logits <= 32 * 2**20 else 0
    return 16 * 2**20 + batch.micro_batches * (6 * 2**20 + kept + batch.mask_bytes)


def _head_gradient(skeleton: Skeleton) -> int:
    """The largest gradient that the head's backward makes; that of the embedding where it is tied to it."""
    return _largest_gradient(skeleton, [len(skeleton.layouts) - 1, *([0] if skeleton.structure.tied else [])])


def _largest_gradient(skeleton: Skeleton, units: Sequence[int]) -> int:
    """The largest gradient of units' parameters, in its own dtype, and in float32 too where that is another."""
    return max(
        (
            slot.elements * (4 if slot.dtype == torch.float32 else slot.dtype.itemsize + 4)
            for unit in units
            for slot in skeleton.layouts[unit].parameters
            if slot.trainable
        ),
        default=0,
    )


def _itemsize(skeleton: Skeleton) -> int:
    return int(skeleton.model.dtype.itemsize)
