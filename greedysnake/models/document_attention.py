"""Rows that hold several documents: what a model is given so that no document attends to another.

transformers models differ in what they understand: most keep documents apart by position numbers that begin
again at 0, some only by a full attention mask, recurrent ones not at all. So a small copy of the model is tried:
the loss of a document in a row with others must be its loss in a row of its own.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from greedysnake.errors import ModelError
from greedysnake.models.initialize import initialize_units
from greedysnake.models.skeleton import Skeleton, build_skeleton, empty_model
from greedysnake.models.streaming import StreamedModel

Form = Literal["positions", "mask", "masks"]

_VOCABULARY, _WINDOW, _FIRST, _SECOND = 64, 5, 7, 11  # sizes of the trial; its documents are longer than the window
_SIZES = {
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "ffn_dim": 64,
}
_SCALE = 3.0  # of fresh weights, so that what attention adds is far above rounding
_NEAR = 0.01  # of the difference that a document before makes where nothing keeps it apart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DocumentAttention:
    """What tells a model where documents begin in a row.

    Attributes:
        form: ``positions``: position numbers alone; ``mask``: an attention mask too; ``masks``: one for each type of
            layer.
        dtype: of the masks, the model's own.
        windows: for ``masks``: by type of layer, how many tokens attention reaches back, itself included, or None.
    """

    form: Form = "positions"
    dtype: torch.dtype = torch.float32
    windows: Mapping[str, int | None] = field(default_factory=dict)

    def inputs(self, position_ids: Tensor) -> dict[str, Any]:
        """The model's inputs for rows whose ``position_ids`` (int64 [B, T]) begin again at 0 with each document."""
        if self.form == "positions":
            return {"position_ids": position_ids}
        documents = (position_ids == 0).cumsum(-1)
        tokens = position_ids.shape[1]
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        visible = (documents[:, None, :, None] == documents[:, None, None, :]) & (distance >= 0)
        if self.form == "mask":
            return {"position_ids": position_ids, "attention_mask": self._additive(visible)}
        masks = {
            kind: self._additive(visible if window is None else visible & (distance < window))
            for kind, window in self.windows.items()
        }
        return {"position_ids": position_ids, "attention_mask": masks}

    def _additive(self, visible: Tensor) -> Tensor:
        """A mask to be added to attention scores, which eager attention and SDPA understand alike."""
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, lowest)


def find_document_attention(config: PretrainedConfig, dtype: torch.dtype) -> DocumentAttention:
    """What keeps the documents of a row apart in a model.

    Args:
        config: of the model; it stays as it is.
        dtype: that the model computes in.

    Raises:
        ModelError: nothing does, or the model cannot be run layer by layer.
    """
    try:
        works = _try_forms(_small(config))
    except Exception as error:  # a copy made small can fail anywhere in the model's own code
        logger.debug("the small copy of a %s failed: %s", config.model_type, error)
        works = _try_forms(_whole(config))
    if works is not None:
        return DocumentAttention(form=works, dtype=dtype, windows=_windows(config))
    raise ModelError(
        f"models of type {config.model_type!r} cannot keep the documents of a packed row apart: what comes before in "
        f"the row changes a document's loss, or its positions cannot be set. Set data.packing to none (a document "
        f"a row, padded) or, where documents may follow each other as in plain text, to whole"
    )


def mask_bytes(config: PretrainedConfig, attention: DocumentAttention, rows: int, tokens: int) -> int:
    """Bytes of the attention masks that the model keeps for one micro-batch of packed or padded rows."""
    resolved = empty_model(config, attention.dtype).config  # which attention is chosen shows in a built model only
    eager = resolved._attn_implementation != "sdpa"
    masks = len(set(getattr(config.get_text_config(), "layer_types", None) or ())) or 1
    itemsize = attention.dtype.itemsize if eager or attention.form != "positions" else 1
    return masks * rows * tokens**2 * itemsize


def _windows(config: PretrainedConfig) -> dict[str, int | None]:
    """How far each type of layer looks back, as far as the config says."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    return {kind: window if "sliding" in kind else None for kind in getattr(text, "layer_types", None) or ()}


def _whole(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with a window shorter than the trial's documents, and no loss but that of tokens."""
    trial = copy.deepcopy(config)
    text = trial.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, _WINDOW)
    if getattr(text, "output_router_logits", False):
        text.output_router_logits = False
    return trial


def _small(config: PretrainedConfig) -> PretrainedConfig:
    """Such a copy with few layers, tokens and experts; whether the model can be built from it is another matter."""
    small = _whole(config)
    text = small.get_text_config()
    layers = text.num_hidden_layers
    kinds = list(getattr(text, "layer_types", None) or ())
    kept = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
    if kept < layers:
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == layers:
                setattr(text, name, value[:kept])
        text.num_hidden_layers = kept
    per_token = getattr(text, "num_experts_per_tok", None) or 1
    experts = 2 * max(per_token, getattr(text, "n_group", None) or 1)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (getattr(text, name, None) or 0) > experts:
            setattr(text, name, experts)
    for name, size in _SIZES.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(size, getattr(text, name)))
    text.pad_token_id, text.bos_token_id, text.eos_token_id = 0, 1, 2
    return small


def _try_forms(config: PretrainedConfig) -> Form | None:
    """The first form that works, None if none does."""
    generator = torch.Generator().manual_seed(0)
    first, other, second = (
        torch.randint(3, _VOCABULARY, (1, count), generator=generator) for count in (_FIRST, _FIRST, _SECOND)
    )
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    forms = [DocumentAttention(), DocumentAttention(form="mask")]
    if windows := _windows(config):
        forms.append(DocumentAttention(form="masks", windows=windows))

    def row(before: Tensor, **inputs: Any) -> dict[str, Any]:
        labels = torch.cat([torch.full_like(before, -100), second], dim=1)
        labels[0, before.shape[1]] = -100
        return {"input_ids": torch.cat([before, second], dim=1), "labels": labels, **inputs}

    rows = [row(first[:, :0]), row(first)]
    for form in forms:
        rows += [row(before, **form.inputs(positions)) for before in (first, other)]
    with torch.random.fork_rng(devices=[]):
        losses = _losses(config, rows)
    alone, crossed, *packed = losses
    if alone is None or crossed is None:
        raise ModelError(f"a model of type {config.model_type!r} cannot be run on a short row")
    for form, *found in zip(forms, packed[::2], packed[1::2], strict=True):
        if all(loss is not None and abs(loss - alone) <= _NEAR * abs(crossed - alone) for loss in found):
            return form.form
    return None


def _losses(config: PretrainedConfig, rows: list[dict[str, Any]]) -> list[float | None]:
    """The loss of each row in a model of fresh float32 weights; None where the model refuses it."""
    skeleton = build_skeleton(config, dtype=torch.float32)
    model = StreamedModel(skeleton, seed=0)
    losses: list[float | None] = [None] * len(rows)
    going = set(range(len(rows)))
    head = len(skeleton.layouts) - 1
    ends = _weights(skeleton, (0, head))
    try:
        model.begin(rows, step=0, target_tokens=1, training=False)
        with torch.no_grad():
            for unit in range(head + 1):
                weights = ends if unit in (0, head) else _weights(skeleton, (unit,))
                for attached in (0, head) if unit == head else (unit,):  # a tied embedding serves the head too
                    skeleton.attach(attached, weights[attached])
                for index in sorted(going):
                    try:
                        if unit == head:
                            losses[index] = float(model.head(index))
                        else:
                            model.forward(unit, index, weights[unit])
                    except Exception as error:  # the model's own code, given inputs that it may not take
                        logger.debug("trial row %d failed at unit %d: %s", index, unit, error)
                        going.discard(index)
                skeleton.detach(unit)
    finally:
        model.close()
    return losses


def _weights(skeleton: Skeleton, units: tuple[int, ...]) -> dict[int, Tensor]:
    """Fresh weights of some units, uint8."""
    masters = {unit: torch.zeros(skeleton.layouts[unit].elements) for unit in units}
    initialize_units(skeleton, masters, seed=0)
    for unit, slot in _matrices(skeleton, units):
        slot.gradient(masters[unit]).mul_(_SCALE)
    return {unit: master.view(torch.uint8) for unit, master in masters.items()}


def _matrices(skeleton: Skeleton, units: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    for unit in units:
        for slot in skeleton.layouts[unit].parameters:
            if len(slot.shape) >= 2:
                yield unit, slot
