"""What of a real model decides how much memory computation takes."""

import re
from collections.abc import Sequence

from transformers import PretrainedConfig

from greedysnake.models.head_chunks import head_problem
from greedysnake.models.skeleton import Skeleton
from greedysnake.plan.activations import ActivationSizes, BatchShape, UnitActivations

_EXPERTS_TOGETHER = re.compile(r"(?<!shared_)experts?\.(?!\d)")


def activation_sizes(skeleton: Skeleton) -> ActivationSizes:
    """The sizes of a model that is cut into units."""
    config = skeleton.model.config.get_text_config()
    inner = range(1, len(skeleton.layouts) - 1)
    head = len(skeleton.layouts) - 1
    return ActivationSizes(
        item_bytes=int(skeleton.model.dtype.itemsize),
        hidden=int(config.hidden_size),
        vocabulary=int(config.vocab_size),
        units=tuple(dict.fromkeys(_unit(skeleton, unit) for unit in inner)),
        embedding_gradient=_largest_gradient(skeleton, [0]),
        head_gradient=_largest_gradient(skeleton, [head, *([0] if skeleton.structure.tied else [])]),
        logits_bytes=_logits_bytes(skeleton),
        head_in_parts=head_problem(skeleton) is None,
    )


def inference_bytes(skeleton: Skeleton, *, rows: int, prompt_tokens: int, tokens: int) -> int:
    """Most bytes of activations without gradients, and of a key/value cache.

    Args:
        skeleton: the model.
        rows: sequences that go through it together.
        prompt_tokens: tokens in the longest prompt, which go through it at once.
        tokens: tokens in the longest sequence in the end.
    """
    config, sizes = skeleton.model.config.get_text_config(), activation_sizes(skeleton)
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    width = int(getattr(config, "head_dim", None) or sizes.hidden // heads)
    kept = int(getattr(config, "num_key_value_heads", None) or heads) * width
    layers = len(skeleton.structure.layers)
    cache = 2 * (layers + 1) * rows * tokens * kept * sizes.item_bytes  # one layer's is copied when it grows
    batch = BatchShape(micro_batches=1, rows=rows, tokens=prompt_tokens)
    computing = max(unit.bytes(batch) for unit in sizes.units)
    return cache + computing + 4 * 4 * rows * sizes.vocabulary


def _unit(skeleton: Skeleton, unit: int) -> UnitActivations:
    config = skeleton.model.config.get_text_config()
    experts_used = int(getattr(config, "num_experts_per_tok", None) or 1)
    features = 0
    for slot in skeleton.layouts[unit].parameters:
        if len(slot.shape) == 2:
            features += sum(slot.shape)
        elif len(slot.shape) == 3:  # experts in one tensor
            features += experts_used * sum(slot.shape[1:])
    layers = len(skeleton.unit_layers[unit])
    return UnitActivations(
        layers=layers,
        token_bytes=3 * features * int(skeleton.model.dtype.itemsize) + 48 * layers * int(config.hidden_size),
        pair_bytes=layers * _attention_heads(config) * _attention_matrix_bytes(config),
        gradient_bytes=_largest_gradient(skeleton, [unit]),
    )


def _logits_bytes(skeleton: Skeleton) -> int:
    """Most bytes that the logits of a token take at once, with all that is computed from them.

    In any dtype: log-probabilities, their gradient and that of the logits, in float32. Measured: 12.0 bytes a logit.
    Logits that are capped by a tanh are kept for its backward, in their own dtype.
    """
    config = skeleton.model.config.get_text_config()
    capped = 3 * int(skeleton.model.dtype.itemsize) if getattr(config, "final_logit_softcapping", None) else 0
    return int(config.vocab_size) * (3 * 4 + capped)


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


def _largest_gradient(skeleton: Skeleton, units: Sequence[int]) -> int:
    """The largest gradient of units' parameters in its own dtype; of experts in one tensor, in float32 too.

    Each expert's use of such a tensor is one of several, whose gradients autograd casts before it adds them.
    """
    sizes = [
        slot.elements
        * (slot.dtype.itemsize + (4 if _EXPERTS_TOGETHER.search(slot.name) and slot.dtype.itemsize < 4 else 0))
        for unit in units
        for slot in skeleton.layouts[unit].parameters
        if slot.trainable
    ]
    return max(sizes, default=0)
