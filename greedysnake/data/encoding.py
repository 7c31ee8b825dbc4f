"""Text to token ids, and stretches of the text to the tokens that they come to."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from greedysnake.data.tokenizer import token_id_bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Characters from the first to before the second."""

logger = logging.getLogger(__name__)


def token_dtype(tokenizer: "PreTrainedTokenizerBase") -> np.dtype:
    """The smallest dtype that holds every id of ``tokenizer``."""
    return np.dtype("<u2" if token_id_bound(tokenizer) <= 2**16 else "<u4")


def begin_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """What ``tokenizer`` puts before a text: its begin-of-text token, or nothing."""
    bos = tokenizer.bos_token_id
    around_nothing = tokenizer("")["input_ids"]
    return (bos,) if bos is not None and list(around_nothing[:1]) == [bos] else ()


def end_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The token that ends a document; without one for it, the next best."""
    for id_ in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if id_ is not None:
            return (id_,)
    logger.warning("the tokenizer has no end-of-text token: documents follow each other without a mark between them")
    return ()


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, offsets: bool = False) -> Any:
    """``texts`` as token ids, nothing added and nothing cut; ``offsets``: with each token's characters."""
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        # Whatever the tokenizer's own files say: training needs every token, and none besides.
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=offsets,
        verbose=False,
    )


def encode_spans(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], spans: Sequence[Sequence[Span]]
) -> list[tuple[list[int], np.ndarray]]:
    """Token ids of each text, and which tokens lie in its ``spans`` (bool), which rise and do not overlap.

    A text is tokenised as a whole, as a model sees it. Where a token would reach over the border of a span with
    more than white space, the text is tokenised in parts, as it is when a model goes on from one of them.
    """
    encoded = encode(tokenizer, texts, offsets=True)
    found = []
    for text, text_spans, ids, offsets in zip(
        texts, spans, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        inside = _inside(text, text_spans, offsets)
        if inside is None:
            found.append(_encode_parts(tokenizer, text, text_spans))
        else:
            found.append((ids, inside))
    return found


def _inside(text: str, spans: Sequence[Span], offsets: Sequence[Span]) -> np.ndarray | None:
    """Which tokens lie in the spans; None if one lies across a border."""
    inside = np.zeros(len(offsets), dtype=bool)
    if not spans or not offsets:
        return inside
    first, last = np.asarray(offsets, dtype=np.int64).T
    for start, end in spans:
        # A token without characters is white space that its tokenizer leaves out: it lies before them.
        touching = np.where(first < last, (last > start) & (first < end), (first > start) & (first <= end))
        for token in np.flatnonzero(touching & ((first < start) | (last > end)) & (first < last)):
            if text[first[token] : start].strip() or text[max(end, first[token]) : last[token]].strip():
                return None
        inside |= touching
    return inside


def _encode_parts(
    tokenizer: "PreTrainedTokenizerBase", text: str, spans: Sequence[Span]
) -> tuple[list[int], np.ndarray]:
    borders = [0, *(border for span in spans for border in span), len(text)]
    ids: list[int] = []
    inside: list[bool] = []
    for number, (start, end) in enumerate(pairwise(borders)):
        part = _encode_part(tokenizer, text[start:end], first=start == 0)
        ids += part
        inside += [number % 2 == 1] * len(part)
    return ids, np.asarray(inside, dtype=bool)


def _encode_part(tokenizer: "PreTrainedTokenizerBase", part: str, *, first: bool) -> list[int]:
    """Tokens of a part of a text: after a line end, as some tokenizers put a space before a text's first word."""
    if not part:
        return []
    if first:
        return list(encode(tokenizer, [part])["input_ids"][0])
    line_end, with_line_end, alone = encode(tokenizer, ["\n", f"\n{part}", part])["input_ids"]
    behind = with_line_end[len(line_end) :]
    return list(behind if with_line_end[: len(line_end)] == line_end else alone)
