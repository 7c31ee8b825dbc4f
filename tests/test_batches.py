"""What a training step is given: every complaint, and the sizes of a batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlavaConfig, XLNetConfig

from greedysnake.cli.prompts import new_token_limit
from greedysnake.engine.batches import IGNORED_LABEL, check_micro_batches, target_tokens
from greedysnake.errors import DataError
from greedysnake.models.positions import max_positions
from greedysnake.plan.activations import BatchShape

CONFIG = LlamaConfig(vocab_size=50, max_position_embeddings=16)


def batch(rows: int = 2, tokens: int = 6, **changes) -> dict:
    ids = torch.arange(rows * tokens).view(rows, tokens) % 50
    return {"input_ids": ids, "labels": ids.clone()} | changes


def complaints(*batches, config=CONFIG) -> list[str]:
    with pytest.raises(DataError) as caught:
        check_micro_batches(batches, config)
    return str(caught.value).split("\n")


def test_the_shape_is_the_largest_of_each():
    shape = check_micro_batches([batch(2, 6), batch(3, 4), batch(1, 16)], CONFIG)
    assert shape == BatchShape(micro_batches=3, rows=3, tokens=16)


def test_positions_below_one_are_no_limit():
    unlimited = XLNetConfig(vocab_size=50)
    assert unlimited.max_position_embeddings == -1
    assert check_micro_batches([batch(1, 40)], unlimited).tokens == 40
    assert max_positions(unlimited) is None
    assert max_positions(CONFIG) == 16
    assert new_token_limit([[1, 2]], 30, unlimited) == 30


def test_an_empty_list():
    assert complaints() == ["a step needs at least one micro-batch, got an empty list"]


def test_absent_tensors():
    assert complaints({"labels": torch.zeros(1, 2, dtype=torch.int64)}) == ["micro-batch 0 has no tensor input_ids"]
    assert complaints(batch(), {"input_ids": batch()["input_ids"]}) == ["micro-batch 1 has no tensor labels"]
    assert complaints({"input_ids": [[1, 2]], "labels": None}) == [
        "micro-batch 0 has no tensor input_ids and no tensor labels"
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"input_ids": torch.zeros(2, 6)}, "torch.float32 [2, 6] and torch.int64 [2, 6]"),
        (
            {"input_ids": torch.zeros(2, 6, dtype=torch.int32)},
            "torch.int32 [2, 6] and torch.int64 [2, 6]",
        ),
        ({"labels": torch.zeros(2, 6)}, "torch.int64 [2, 6] and torch.float32 [2, 6]"),
        ({"labels": torch.zeros(2, 5, dtype=torch.int64)}, "torch.int64 [2, 6] and torch.int64 [2, 5]"),
        ({"labels": torch.zeros(6, dtype=torch.int64)}, "torch.int64 [2, 6] and torch.int64 [6]"),
        (
            {"input_ids": torch.zeros(6, dtype=torch.int64), "labels": torch.zeros(6, dtype=torch.int64)},
            "torch.int64 [6] and torch.int64 [6]",
        ),
    ],
)
def test_wrong_dtypes_and_shapes(changes, told):
    expected = f"micro-batch 0: input_ids and labels must be int64 of one shape [rows, tokens], got {told}"
    assert complaints(batch(**changes)) == [expected]


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0)])
def test_an_empty_micro_batch(shape):
    assert complaints(batch(*shape)) == [f"micro-batch 0 is empty: input_ids has shape {list(shape)}"]


@pytest.mark.parametrize(("value", "low", "high"), [(50, 0, 50), (-1, -1, 10), (-100, -100, 10)])
def test_ids_outside_the_vocabulary(value, low, high):
    bad = batch(2, 6)
    bad["input_ids"][0, 1] = value
    bad["input_ids"][1, 5] = 10
    assert complaints(bad) == [
        f"micro-batch 0: input_ids lie between {low} and {high}, but the model's vocabulary has 50 entries"
    ]


@pytest.mark.parametrize(("value", "low", "high"), [(50, 0, 50), (-1, -1, 11), (-101, -101, 11)])
def test_labels_outside_the_vocabulary(value, low, high):
    bad = batch(2, 6)
    bad["labels"][0, 1] = value
    bad["labels"][0, 2] = IGNORED_LABEL
    assert complaints(bad) == [
        f"micro-batch 0: labels must be -100 or below the vocabulary size 50, got {low} to {high}"
    ]


def test_too_many_positions():
    assert complaints(batch(1, 17)) == ["micro-batch 0 has 17 tokens in a row, but the model has 16 positions"]
    config = LlamaConfig(vocab_size=50)
    del config.max_position_embeddings
    check_micro_batches([batch(1, 17)], config)


@pytest.mark.parametrize(
    "batches",
    [
        [batch(labels=torch.full((2, 6), IGNORED_LABEL))],
        [batch(5, 1), batch(2, 1)],
        [batch(labels=torch.tensor([[1, *[IGNORED_LABEL] * 5]] * 2))],  # the first label of a row is never predicted
    ],
)
def test_no_label_counts(batches):
    assert complaints(*batches) == ["no label counts: all are -100, or every row has a single token"]


def test_one_counted_label_is_enough():
    labels = torch.full((2, 6), IGNORED_LABEL)
    check_micro_batches([batch(labels=labels), batch(5, 1), batch(2, 3)], CONFIG)


def test_all_complaints_come_at_once():
    bad = batch(1, 17)
    bad["input_ids"][0, 0] = bad["labels"][0, 0] = 99
    told = complaints({}, bad, batch(), batch(0, 3), batch(labels=torch.zeros(1)))
    assert [line.split(":")[0].split(" has")[0].split(" is")[0] for line in told] == [
        f"micro-batch {number}" for number in (0, 1, 1, 1, 3, 4)
    ]


def test_the_text_model_of_a_config_with_several_counts():
    config = LlavaConfig(text_config=LlamaConfig(vocab_size=50, max_position_embeddings=16))
    assert check_micro_batches([batch(2, 6)], config) == BatchShape(micro_batches=1, rows=2, tokens=6)
    assert len(complaints(batch(1, 17), config=config)) == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 6)).flatmap(
            lambda size: st.lists(
                st.lists(st.sampled_from([IGNORED_LABEL, 0, 7]), min_size=size[1], max_size=size[1]),
                min_size=size[0],
                max_size=size[0],
            )
        ),
        max_size=4,
    )
)
def test_target_tokens_are_the_labels_that_a_token_before_predicts(batches):
    expected = sum(label != IGNORED_LABEL for rows in batches for row in rows for label in row[1:])
    assert target_tokens([{"labels": torch.tensor(rows)} for rows in batches]) == expected


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask has shape [2, 5], input_ids [2, 6]"),
        ({"attention_mask": torch.ones(2, 1, 6, 5)}, "attention_mask has shape [2, 1, 6, 5]; [2, 1, 6, 6] fits"),
        ({"attention_mask": torch.ones(3, 1, 6, 6)}, "attention_mask has shape [3, 1, 6, 6]; [2, 1, 6, 6] fits"),
        ({"attention_mask": [1]}, "attention_mask is a list, not a tensor"),
        (
            {"attention_mask": {"full_attention": torch.ones(2, 1, 6, 6), "sliding_attention": torch.ones(2, 4)}},
            "attention_mask of sliding_attention has shape [2, 4], input_ids [2, 6]",
        ),
        ({"position_ids": torch.zeros(2, 6)}, "position_ids must be int64 [2, 6], got torch.float32 [2, 6]"),
        (
            {"position_ids": torch.zeros(2, 5, dtype=torch.int64)},
            "position_ids must be int64 [2, 6], got torch.int64 [2, 5]",
        ),
    ],
)
def test_masks_and_positions_that_do_not_fit(changes, told):
    (line,) = complaints(batch(**changes))
    assert line.startswith(f"micro-batch 0: {told}")


def test_masks_and_positions_that_fit():
    masks = [torch.ones(2, 6), torch.ones(2, 1, 6, 6), torch.ones(1, 4, 6, 6), {"full_attention": None}, None]
    for mask in masks:
        for positions in (torch.arange(6)[None], torch.arange(6).repeat(2, 1), None):
            check_micro_batches([batch(attention_mask=mask, position_ids=positions)], CONFIG)
