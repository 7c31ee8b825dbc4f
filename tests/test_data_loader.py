"""Token batches by step: what a run sees, and what it never sees."""

import logging
import random
import string
from pathlib import Path

import pytest
import torch

from greedysnake.data import TokenBatches, byte_tokenizer, check_sequence_length, load_data
from greedysnake.errors import DataError

TOKENIZER = byte_tokenizer()
LENGTH = 8


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """50 sequences of 8 tokens, all different, and three tokens more, in two documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    letters = "".join(random.Random(0).choices(string.ascii_letters, k=401))
    (folder / "a.txt").write_text(letters[:100])
    (folder / "b.txt").write_text(letters[100:])
    return folder


def load(corpus, **changes) -> TokenBatches:
    options = {
        "train": corpus,
        "tokenizer": TOKENIZER,
        "sequence_length": LENGTH,
        "micro_batch_size": 2,
        "micro_batches": 3,
        "seed": 0,
        "cache_dir": Path(corpus).parent / "cache",
    }
    return load_data(**options | changes)


def sequences(batches: TokenBatches, steps: range) -> list[tuple[int, ...]]:
    """The sequences of ``steps``, in the run's order."""
    return [
        tuple(row.tolist()) for step in steps for micro_batch in batches.step(step) for row in micro_batch["input_ids"]
    ]


def evaluated(batches: TokenBatches, batch_size: int = 4) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in batches.evaluation(batch_size) for row in batch["input_ids"]]


def test_a_step_is_a_list_of_micro_batches(corpus):
    batches = load(corpus)
    micro_batches = batches.step(0)
    assert len(micro_batches) == 3
    for micro_batch in micro_batches:
        assert set(micro_batch) == {"input_ids", "labels"}
        assert micro_batch["input_ids"].shape == micro_batch["labels"].shape == (2, LENGTH)
        assert micro_batch["input_ids"].dtype == micro_batch["labels"].dtype == torch.int64
        assert torch.equal(micro_batch["input_ids"], micro_batch["labels"])
        micro_batch["labels"].fill_(-100)
        assert micro_batch["input_ids"].min() >= 0
    assert batches.step(0)[0]["labels"].min() >= 0, "what a caller does to a batch stays with the caller"


def test_counts(corpus):
    batches = load(corpus)
    assert (batches.sequences, batches.tokens, batches.sequence_length) == (50, 400, LENGTH)
    assert (batches.sequences_per_step, batches.tokens_per_step) == (6, 48)
    assert batches.steps_per_epoch == 9
    report = batches.report
    assert (report.files, report.documents, report.tokens, report.dropped_tokens) == (2, 2, 403, 3)
    assert batches.evaluation_sequences == 0
    assert list(batches.evaluation(4)) == []


def test_each_epoch_takes_each_sequence_once_in_another_order(corpus):
    batches = load(corpus)
    run = sequences(batches, range(25))
    text = (corpus / "a.txt").read_bytes() + b"\x00" + (corpus / "b.txt").read_bytes()
    ids = [256 if byte == 0 else byte for byte in text]
    expected = sorted(tuple(ids[at : at + LENGTH]) for at in range(0, 400, LENGTH))
    for epoch in range(3):
        assert sorted(run[50 * epoch : 50 * (epoch + 1)]) == expected
    assert run[:50] != run[50:100] != run[100:150]
    assert run[:50] != expected


@pytest.mark.parametrize(("size", "count"), [(1, 1), (1, 6), (6, 1), (3, 2), (5, 7), (60, 2)])
def test_the_run_does_not_depend_on_how_it_is_grouped(corpus, size, count):
    run = sequences(load(corpus), range(40))
    grouped = load(corpus, micro_batch_size=size, micro_batches=count)
    steps = 240 // (size * count)
    assert sequences(grouped, range(steps)) == run[: steps * size * count]
    assert {batch["input_ids"].shape[0] for batch in grouped.step(3)} == {size}


def test_steps_come_in_any_order(corpus):
    batches = load(corpus)
    forward = [sequences(batches, range(step, step + 1)) for step in range(30)]
    assert [sequences(batches, range(step, step + 1)) for step in reversed(range(30))] == forward[::-1]
    resumed = load(corpus)
    assert sequences(resumed, range(17, 18)) == forward[17]
    assert resumed.fingerprint == batches.fingerprint
    with pytest.raises(ValueError, match="step is -1"):
        batches.step(-1)


def test_the_seed_decides_the_order(corpus, tmp_path):
    runs = [sequences(load(corpus, seed=seed), range(8)) for seed in range(5)]
    assert len(set(map(tuple, runs))) == 5
    assert sequences(load(corpus, seed=3, cache_dir=tmp_path / "elsewhere"), range(8)) == runs[3]


def test_fewer_sequences_than_a_step_needs(corpus, caplog):
    with caplog.at_level(logging.WARNING):
        batches = load(corpus, micro_batch_size=60, micro_batches=2)
    assert "50 training sequences are fewer than the 120 of one step" in caplog.text
    assert batches.steps_per_epoch == 1
    assert len(set(sequences(batches, range(1)))) == 50


@pytest.mark.parametrize(("share", "count"), [(0.001, 1), (0.1, 5), (0.5, 25)])
def test_a_share_for_evaluation_is_never_trained_on(corpus, share, count):
    batches = load(corpus, eval_share=share)
    held_out = evaluated(batches)
    assert len(held_out) == len(set(held_out)) == batches.evaluation_sequences == count
    assert batches.sequences == 50 - count
    trained = set(sequences(batches, range(3 * batches.steps_per_epoch)))
    assert len(trained) == 50 - count
    assert not trained & set(held_out)
    assert evaluated(batches, 1) == evaluated(batches, 100) == held_out == evaluated(load(corpus, eval_share=share))


def test_evaluation_batches_cover_the_rest_too(corpus):
    batches = load(corpus, eval_share=0.1)
    assert [batch["labels"].shape for batch in batches.evaluation(2)] == [(2, LENGTH), (2, LENGTH), (1, LENGTH)]
    with pytest.raises(ValueError, match="batch_size is 0"):
        list(batches.evaluation(0))


def test_evaluation_files_of_their_own(corpus, tmp_path):
    path = tmp_path / "validation.jsonl"
    path.write_text('{"text": "0123456"}\n{"text": "abcdefghijk"}\n')
    batches = load(corpus, evaluation=path)
    assert evaluated(batches) == [(*b"0123456", 256), tuple(b"abcdefgh")]
    assert batches.sequences == 50


def test_a_training_file_that_is_evaluated_on_is_left_out(corpus, tmp_path, caplog):
    copy = tmp_path / "copy.txt"
    copy.write_bytes((corpus / "a.txt").read_bytes())
    with caplog.at_level(logging.WARNING):
        for evaluation in (corpus / "a.txt", copy):
            batches = load(corpus, evaluation=evaluation)
            assert batches.report.files == 1
            assert batches.sequences == 302 // LENGTH
    assert "1 training files are evaluation files too and were left out of training" in caplog.text
    with pytest.raises(DataError, match=r"every training file \(.*a\.txt is the first of 2\) is an evaluation file"):
        load(corpus, evaluation=corpus)


def test_the_fingerprint_tells_other_data(corpus, tmp_path):
    (tmp_path / "validation.txt").write_text("some other text")
    same = {load(corpus).fingerprint, load(corpus, micro_batch_size=5, micro_batches=1).fingerprint}
    others = [
        {"seed": 1},
        {"sequence_length": 9},
        {"eval_share": 0.1},
        {"evaluation": tmp_path / "validation.txt"},
        {"train": corpus / "b.txt", "cache_dir": tmp_path / "cache"},
    ]
    assert len(same) == 1
    assert len(same | {load(corpus, **changes).fingerprint for changes in others}) == 1 + len(others)


def test_what_was_skipped_is_reported(corpus):
    (corpus / "z.bin").write_bytes(b"\0")
    (corpus / "empty.txt").write_text("")
    report = load(corpus).report
    assert report.skipped_files == (corpus / "z.bin",)
    assert report.empty_files == (corpus / "empty.txt",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0; set it to 1 or more"),
        ({"micro_batches": -1}, "micro_batches is -1; set it to 1 or more"),
        ({"seed": -1}, "seed is -1; set it to 0 or more"),
        ({"eval_share": 0.1, "evaluation": "x.txt"}, "evaluation data is given twice"),
        ({"eval_share": 0.999}, "takes 50 of 50 sequences and leaves none for training"),
        ({"sequence_length": 500}, "and 1 more files: 403 tokens found, a sequence needs 500; add text, or set"),
        ({"vocab_size": 256}, r"token 256 \('<\|endoftext\|>'\) occurs, the model's vocab_size is 256"),
    ],
)
def test_settings_that_cannot_be_are_errors(corpus, changes, message):
    with pytest.raises(DataError, match=message):
        load(corpus, **changes)


def test_evaluation_files_too_short_are_an_error(corpus, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abc")
    with pytest.raises(DataError, match=r"evaluation data .*short\.txt: 4 tokens found, a sequence needs 8"):
        load(corpus, evaluation=path)


def test_sequences_must_fit_the_positions_of_the_model():
    check_sequence_length(2048, 2048, "tiny")
    check_sequence_length(2048, None, "tiny")
    with pytest.raises(DataError, match="tiny: sequence_length is 2049, the model has 2048 positions; set"):
        check_sequence_length(2049, 2048, "tiny")
