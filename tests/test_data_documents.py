"""Documents in rows: every token once, the right ones learnt, none of another document seen."""

import json
import logging
from itertools import pairwise
from pathlib import Path

import chat_templates as templates
import numpy as np
import pytest
import torch
from chat_templates import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.data import (
    CutReport,
    TokenBatches,
    TokenWriter,
    byte_tokenizer,
    document_rows,
    load_data,
    pack,
    pack_pieces,
)
from greedysnake.data.documents import cut_documents
from greedysnake.data.rows import IGNORED_LABEL, Row, collate, position_inputs
from greedysnake.data.token_files import TokenFile
from greedysnake.errors import DataError
from greedysnake.models.document_attention import DocumentAttention

DOCUMENTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=25)
"""For each document, which of its tokens are to be learnt."""


def write(folder: Path, documents: list[list[bool]], *, masked: bool = True) -> TokenFile:
    """A token file in which every token is another one."""
    with TokenWriter(folder / "tokens.bin", np.dtype("<u2"), masked=masked) as writer:
        number = 0
        for learnt in documents:
            writer.begin_document()
            half = len(learnt) // 2  # a document may come in parts
            for part in (learnt[:half], learnt[half:]):
                writer.write(range(number, number + len(part)), np.asarray(part, dtype=bool) if masked else None)
                number += len(part)
        return writer.finish()


@settings(max_examples=100, deadline=None)
@given(documents=DOCUMENTS, start=st.integers(0, 100), length=st.integers(0, 100))
def test_a_token_file_holds_tokens_starts_and_targets(tmp_path_factory, documents, start, length):
    file = write(tmp_path_factory.mktemp("tokens"), documents)
    flat = [learnt for document in documents for learnt in document]
    assert file.open().tolist() == list(range(len(flat)))
    assert np.diff(file.starts()).tolist() == [len(document) for document in documents]
    stop = min(start + length, len(flat))
    if start <= stop:
        assert file.targets().read(start, stop).tolist() == flat[start:stop]
    starts = np.asarray(file.starts())
    counts = file.targets().count(starts[:-1], np.diff(starts))
    assert counts.tolist() == [sum(document[1:]) for document in documents]


@settings(max_examples=300, deadline=None)
@given(
    documents=DOCUMENTS,
    masked=st.booleans(),
    length=st.integers(2, 40),
    how=st.tuples(st.booleans(), st.sampled_from(["truncate", "split", "drop"])),
)
def test_rows_hold_every_token_once_and_only_whole_documents(tmp_path_factory, documents, masked, length, how):
    packed, long = how
    file = write(tmp_path_factory.mktemp("tokens"), documents, masked=masked)
    pieces, start = [], 0
    for learnt in documents:
        ids = list(range(start, start + len(learnt)))
        start += len(learnt)
        flags = learnt if masked else [True] * len(learnt)
        if len(ids) <= length or long == "truncate":
            cuts = [(0, min(len(ids), length))]
        else:
            cuts = [] if long == "drop" else [(at, min(at + length, len(ids))) for at in range(0, len(ids), length)]
        pieces += [(ids[a:b], flags[a:b]) for a, b in cuts if any(flags[a + 1 : b])]
    if not pieces:
        with pytest.raises(DataError, match=f"corpus: none of {len(documents)} documents has a token to learn"):
            document_rows(file, length, packed=packed, long_documents=long, source="corpus")
        return
    rows = document_rows(file, length, packed=packed, long_documents=long, source="corpus")
    found = []
    for number in range(len(rows)):
        row = rows.row(number)
        assert 2 <= len(row.ids) <= length
        positions = row.positions if packed else np.arange(len(row.ids))
        assert (row.positions is None) != packed
        borders = [*np.flatnonzero(positions == 0).tolist(), len(row.ids)]
        assert borders[0] == 0
        for a, b in pairwise(borders):
            assert positions[a:b].tolist() == list(range(b - a))
            assert row.labels[a] == IGNORED_LABEL, "nothing before a document may predict it"
            learnt = [label != IGNORED_LABEL for label in row.labels[a:b]]
            assert row.labels[a:b][learnt].tolist() == row.ids[a:b][learnt].tolist()
            found.append((row.ids[a:b].tolist(), learnt))
        assert row.learnt.tolist() == (row.labels != IGNORED_LABEL).tolist()
    expected = [(ids, [False, *flags[1:]]) for ids, flags in pieces]
    assert sorted(found) == sorted(expected)
    if not packed:
        assert found == expected
    assert rows.tokens == sum(len(ids) for ids, _ in expected)
    assert rows.targets == sum(sum(flags) for _, flags in expected)
    assert rows.tokens + rows.dropped_tokens == file.tokens
    cut = rows.cut
    too_long = [d for d in documents if len(d) > length]
    assert cut.truncated_documents == (len(too_long) if long == "truncate" else 0)
    assert cut.truncated_tokens == (sum(len(d) - length for d in too_long) if long == "truncate" else 0)
    assert cut.dropped_documents == (len(too_long) if long == "drop" else 0)
    assert cut.split_documents == (len(too_long) if long == "split" else 0)


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 60),
    data=st.data(),
)
def test_packing_fills_rows_well_and_in_the_order_of_the_corpus(capacity, data):
    lengths = np.asarray(data.draw(st.lists(st.integers(1, capacity), max_size=60)), dtype=np.int64)
    order, first = pack_pieces(lengths, capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = [order[a:b].tolist() for a, b in pairwise(first)]
    assert all(row and row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    sums = [int(lengths[row].sum()) for row in rows]
    assert all(total <= capacity for total in sums)
    assert sum(sorted(sums)[:2]) > capacity or len(sums) < 2, "two rows would fit into one"


def test_packing_is_that_of_every_release():
    # Written down: a run begun with an older release and resumed with this one must find the same rows.
    order, first = pack_pieces(np.asarray([3, 9, 2, 5, 5, 1, 7, 4, 10]), 10)
    assert [order[a:b].tolist() for a, b in pairwise(first)] == [
        [0, 6],
        [1, 5],
        [2, 7],
        [3, 4],
        [8],
    ]


def test_what_is_lost_is_told(tmp_path, caplog):
    file = write(tmp_path, [[True] * 9, [True] * 3, [True, False, False], [True] * 20])
    with caplog.at_level(logging.WARNING):
        document_rows(file, 6, packed=True, long_documents="truncate", source="corpus")
    assert "corpus: 2 of 4 documents have more than 6 tokens; their ends were cut off (17 tokens)" in caplog.text
    assert "corpus: 1 documents or parts have no token to learn and were left out (3 tokens)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        document_rows(file, 6, packed=False, long_documents="drop", source="corpus")
    assert "corpus: 2 of 4 documents have more than 6 tokens and were dropped (29 tokens)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        document_rows(file, 20, packed=False, long_documents="truncate", source="corpus")
        cut_documents(file, 6, "split")
    assert "cut off" not in caplog.text
    with pytest.raises(DataError, match="sequence_length is 1; at least 2"):
        document_rows(file, 1, packed=True, long_documents="split", source="corpus")


@settings(max_examples=100, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(2, 12))
def test_whole_sequences_keep_their_mask(tmp_path_factory, documents, length):
    file = write(tmp_path_factory.mktemp("tokens"), documents)
    flat = np.asarray([learnt for document in documents for learnt in document])
    whole = len(flat) // length
    useful = [n for n in range(whole) if flat[n * length + 1 : (n + 1) * length].any()]
    if not useful:
        with pytest.raises(DataError):
            pack(file.open(), length, source="corpus", target_bits=file.targets())
        return
    packed = pack(file.open(), length, source="corpus", target_bits=file.targets())
    assert packed.rows.tolist() == useful
    for number, row in enumerate(useful):
        ids = np.arange(row * length, (row + 1) * length)
        found = packed.row(number)
        assert found.ids.tolist() == ids.tolist()
        assert found.labels.tolist() == np.where(flat[ids], ids, IGNORED_LABEL).tolist()
        assert found.positions is None
    assert packed.targets == sum(int(flat[n * length + 1 : (n + 1) * length].sum()) for n in useful)
    assert packed.tokens + packed.dropped_tokens == len(flat)


def row(*lengths: int, packed: bool = True) -> Row:
    positions = np.concatenate([np.arange(length) for length in lengths])
    ids = np.arange(1, len(positions) + 1)
    return Row(ids=ids, labels=np.where(positions == 0, IGNORED_LABEL, ids), positions=positions if packed else None)


def test_padding_is_masked():
    batch = collate([row(3, packed=False), row(5, packed=False)], pad_token=9, attention=position_inputs)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9], [1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100], [-100, 2, 3, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    alone = collate([row(5, packed=False)], pad_token=9, attention=position_inputs)
    assert set(alone) == {"input_ids", "labels"}, "without padding there is nothing to mask"


def test_padding_of_packed_rows_is_a_document_of_its_own():
    batch = collate([row(2, 3), row(4), row(3, 4)], pad_token=9, attention=position_inputs)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [
        [0, 1, 0, 1, 2, 0, 1],
        [0, 1, 2, 3, 0, 1, 2],
        [0, 1, 2, 0, 1, 2, 3],
    ]
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    single = collate([row(4), row(2)], pad_token=9, attention=position_inputs)
    assert set(single) == {"input_ids", "labels", "attention_mask"}, "rows of one document need no more than a mask"


def test_masks_show_each_document_its_own_past_and_nothing_else():
    positions = collate([row(2, 3), row(4)], pad_token=9, attention=position_inputs)["position_ids"]
    documents = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    attention = DocumentAttention(form="masks", windows={"full_attention": None, "sliding_attention": 2})
    inputs = attention.inputs(positions)
    assert torch.equal(inputs["position_ids"], positions)
    for kind, window in attention.windows.items():
        mask = inputs["attention_mask"][kind]
        assert mask.shape == (2, 1, 5, 5)
        for b in range(2):
            for query in range(5):
                for key in range(5):
                    near = key <= query and (window is None or query - key < window)
                    visible = documents[b][query] == documents[b][key] and near
                    assert (mask[b, 0, query, key] == 0) == visible
    one = DocumentAttention(form="mask", dtype=torch.bfloat16).inputs(positions)["attention_mask"]
    assert one.dtype == torch.bfloat16
    assert torch.equal(one == 0, inputs["attention_mask"]["full_attention"] == 0)
    assert not one.isinf().any(), "infinities would make NaN of a row that sees nothing"


TOKENIZER = chat_tokenizer(templates.MARKED)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """30 chats of 2 to 60 words."""
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for number in range(30):
            turns = [("user", f"Say {number}."), ("assistant", " ".join([str(number)] * (number % 12 + 1)))]
            messages = [{"role": role, "content": text} for role, text in turns * (number % 3 + 1)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def load(path: Path, **changes) -> TokenBatches:
    options = {
        "train": path,
        "tokenizer": TOKENIZER,
        "sequence_length": 128,
        "micro_batch_size": 2,
        "micro_batches": 3,
        "seed": 0,
        "cache_dir": path.parent / "cache",
    }
    return load_data(**options | changes)


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("packing", ["documents", "none", "whole"])
def test_a_step_is_the_same_whenever_it_is_asked_for(chats, packing):
    batches = load(chats, packing=packing)
    steps = [batches.step(step) for step in range(12)]
    again = load(chats, packing=packing)
    for step in reversed(range(12)):
        for once, twice in zip(steps[step], again.step(step), strict=True):
            assert same(once, twice)
    assert any(not same(steps[0][0], later[0]) for later in steps[1:])
    assert again.fingerprint == batches.fingerprint


def learnt_texts(batches: TokenBatches, steps: range) -> list[str]:
    found = []
    for step in steps:
        for batch in batches.step(step):
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                found.append(TOKENIZER.decode(ids[labels != IGNORED_LABEL]))
    return found


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_an_epoch_learns_every_answer_once(chats, packing):
    batches = load(chats, packing=packing, micro_batch_size=1, micro_batches=1, sequence_length=512)
    assert batches.report.cut == CutReport()
    answers = "".join(learnt_texts(batches, range(batches.sequences))).split("<|im_end|>")[:-1]
    messages = [message for line in chats.read_text().splitlines() for message in json.loads(line)["messages"]]
    assert sorted(answers) == sorted(m["content"] for m in messages if m["role"] == "assistant")
    learnt = [batch["labels"][:, 1:] != -100 for step in range(batches.sequences) for batch in batches.step(step)]
    assert batches.report.targets == sum(int(one.sum()) for one in learnt)


def test_defaults_by_format(chats, tmp_path):
    text = tmp_path / "a.jsonl"
    text.write_text(json.dumps({"text": "words " * 300}) + "\n" + json.dumps({"text": "more"}) + "\n")
    assert load(chats).report.packing == "documents"
    assert load(chats).report.cut.truncated_documents > 0
    assert load(text).report.packing == "whole"
    split = load(text, packing="documents").report
    assert (split.packing, split.cut.split_documents, split.cut.truncated_documents) == ("documents", 1, 0)
    assert load(text, packing="documents", long_documents="drop").report.dropped_tokens == 1801


def test_the_fingerprint_tells_all_that_decides(chats):
    changes = [
        {},
        {"packing": "none"},
        {"packing": "whole"},
        {"long_documents": "drop"},
        {"sequence_length": 100},
        {"seed": 1},
        {"eval_share": 0.2},
        {"tokenizer": chat_tokenizer(templates.TRIMMED)},
    ]
    assert len({load(chats, **change).fingerprint for change in changes}) == len(changes)
    assert load(chats, micro_batch_size=1).fingerprint == load(chats).fingerprint
    whole = {load(chats, packing="whole", long_documents=long).fingerprint for long in ("auto", "truncate", "drop")}
    assert len(whole) == 1, "no document is too long for it"


def test_held_out_rows_share_no_document_with_training(chats):
    batches = load(chats, eval_share=0.3)
    held_out = list(batches.evaluation(2))
    assert sum(len(batch["input_ids"]) for batch in held_out) == batches.evaluation_sequences > 0
    seen = {
        tuple(ids[labels != -100].tolist())
        for batch in held_out
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    }
    for step in range(batches.steps_per_epoch):
        for batch in batches.step(step):
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
                assert tuple(ids[labels != -100].tolist()) not in seen


def test_padding_uses_an_id_that_the_model_has(chats):
    tokenizer = byte_tokenizer()
    text = chats.parent / "text.jsonl"
    text.write_text('{"text": "one"}\n{"text": "longer"}\n')
    options = {"tokenizer": tokenizer, "packing": "none", "micro_batches": 1}
    assert load(text, **options).pad_token == tokenizer.pad_token_id
    assert load(text, **options, vocab_size=257).pad_token == tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.eos_token = None
    assert load(text, **options).pad_token == 0
