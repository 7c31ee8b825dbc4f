"""Memory that torch needs while it computes one unit for one micro-batch: an estimate from shapes.

Every weight matrix is taken to keep its input and its output, and elementwise operations to keep as
much again. Parameters' gradients come as whole tensors before they are added to the flat buffer, one at a time.
"""

from dataclasses import dataclass

LOGITS_BYTES = 2**30
"""What a micro-batch's logits and all that is computed from them may take before they are computed in parts."""

KEPT_LEAVES = 1 / 16
"""Part of the memory that kept activations leave free: torch's allocator has the last word on what they take."""

_KEPT_MARGIN = 1.1  # the allocator does not fill its memory quite; real tensors may be laid out with a little more
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


@dataclass(frozen=True, kw_only=True)
class UnitActivations:
    """What a decoder unit takes while it is recomputed and goes backward.

    Attributes:
        layers: decoder layers of it.
        token_bytes: for each token of a micro-batch.
        pair_bytes: for each two tokens of a sequence, where the attention's weights are made at all.
        gradient_bytes: of the largest gradient.
    """

    layers: int
    token_bytes: int
    pair_bytes: int
    gradient_bytes: int

    def bytes(self, batch: BatchShape) -> int:
        """Bytes for one micro-batch, gradients left out."""
        return batch.rows * batch.tokens * (self.token_bytes + batch.tokens * self.pair_bytes)


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """What of a model decides how much memory a micro-batch takes; found by ``model_sizes.activation_sizes``.

    Attributes:
        item_bytes: of one number of the weights and activations.
        hidden: width of the model.
        vocabulary: rows of the output projection.
        units: of the decoder units, one of each kind.
        embedding_gradient: bytes of the embedding's largest gradient.
        head_gradient: of the head's; that of the embedding where it is tied to it.
        logits_bytes: that a token's logits take at once, with all that is computed from them.
        head_in_parts: whether the logits of a micro-batch can be computed a few tokens at a time.
    """

    item_bytes: int
    hidden: int
    vocabulary: int
    units: tuple[UnitActivations, ...]
    embedding_gradient: int
    head_gradient: int
    logits_bytes: int
    head_in_parts: bool


def boundary_bytes(sizes: ActivationSizes, batch: BatchShape) -> int:
    """Bytes of the activation between two units for one micro-batch: [B, T, hidden]."""
    return batch.rows * batch.tokens * sizes.hidden * sizes.item_bytes


def unit_activation_bytes(sizes: ActivationSizes, batch: BatchShape) -> int:
    """Most bytes that the recompute and backward of a decoder unit, or the embedding's backward, hold at once."""
    return max(sizes.embedding_gradient, *(unit.bytes(batch) + unit.gradient_bytes for unit in sizes.units))


def layer_activation_bytes(sizes: ActivationSizes, tokens: int) -> int:
    """Most bytes that the recompute and backward of a layer hold at once, for one sequence of ``tokens``."""
    batch = BatchShape(micro_batches=1, rows=1, tokens=tokens)
    return max(unit.bytes(batch) // unit.layers for unit in sizes.units)


def kept_bytes(saved: int, *, layers: int, rows: int) -> int:
    """Most bytes that a decoder unit's activations of one micro-batch take while they are kept for the backward.

    Args:
        saved: bytes that a layer saves for one sequence.
        layers: of the unit.
        rows: sequences of the micro-batch.
    """
    return round(_KEPT_MARGIN * layers * rows * saved)


def head_activation_bytes(sizes: ActivationSizes, batch: BatchShape, chunk_tokens: int | None = None) -> int:
    """Most bytes of the logits that exist at once, their float32 copy, log-probabilities and gradients.

    Args:
        sizes: of the model.
        batch: sizes of the batch.
        chunk_tokens: tokens of a micro-batch whose logits exist at once; None: all.
    """
    tokens = batch.rows * batch.tokens
    others = 12 * tokens * sizes.hidden  # float32 copies of the last norm, of hidden states
    if chunk_tokens is not None and chunk_tokens < tokens:
        # one more position of each row than predicts something; hidden states and their gradient are kept meanwhile
        tokens = chunk_tokens + batch.rows
        others += 2 * boundary_bytes(sizes, batch)
    # gradients of the parameters come when the loss's own memory is free and the logits' gradient is left
    gradient = tokens * sizes.vocabulary * sizes.item_bytes + sizes.head_gradient
    return others + max(tokens * sizes.logits_bytes, gradient)


def planned_head_tokens(sizes: ActivationSizes, batch: BatchShape, budget: int | None = None) -> int | None:
    """Tokens of a micro-batch whose logits should exist at once; None: all, as they are few or cannot be parted.

    Depends on what is configured alone, not on what happens to be free: the parts decide the order of additions, and
    so the rounding, which must be the same when a run is resumed.

    Args:
        sizes: of the model.
        batch: sizes of the batch.
        budget: bytes of memory that computation is told to use; None: not told.
    """
    if not sizes.head_in_parts:
        return None
    allowed = max(LOGITS_BYTES, sizes.head_gradient)  # that gradient is there at the same time anyway
    if budget is not None:
        allowed = min(allowed, budget // _BUDGET_PARTS)
    tokens = batch.rows * batch.tokens
    if tokens * sizes.logits_bytes <= allowed:
        return None
    fitting = allowed // sizes.logits_bytes // _FEWEST_TOKENS * _FEWEST_TOKENS
    chunk = max(_FEWEST_TOKENS, batch.rows, fitting)
    return chunk if chunk < tokens else None


def paused_bytes(sizes: ActivationSizes, batch: BatchShape, chunk_tokens: int | None = None) -> int:
    """Attention masks of the paused micro-batches, and what the allocator keeps of memory that they gave back.

    The C library gives blocks of more than 32 MiB back to the kernel at once, smaller ones not always: measured.
    """
    tokens = min(batch.rows * batch.tokens, chunk_tokens or batch.rows * batch.tokens)
    logits = 4 * tokens * sizes.vocabulary
    kept = logits if logits <= 32 * 2**20 else 0
    return 16 * 2**20 + batch.micro_batches * (6 * 2**20 + kept + batch.mask_bytes)
