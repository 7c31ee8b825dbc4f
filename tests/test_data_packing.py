"""Tokens on disk, cut into sequences, and split."""

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from greedysnake.data import (
    EpochOrder,
    RecordFormat,
    TokenFile,
    byte_tokenizer,
    load_documents,
    pack,
    split_for_evaluation,
    survey_files,
    tokenise_examples,
    tokenise_files,
    write_tokens,
)
from greedysnake.data.packing import stable_permutation
from greedysnake.errors import DataError

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def word_tokenizer(words: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, words[bos])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def tokenise(folder: Path, contents: list[str], tokenizer=TOKENIZER, **options) -> TokenFile:
    for number, content in enumerate(contents):
        (folder / f"{number:03}.txt").write_bytes(content.encode())
    survey = survey_files(folder)
    return tokenise_files(survey, tokenizer=tokenizer, text_field="text", cache_dir=folder / ".cache", **options)


@settings(max_examples=30, deadline=None)
@given(
    contents=st.lists(st.text(st.sampled_from("ab \né🐍")), min_size=1, max_size=5).filter(
        lambda texts: any(text.strip() for text in texts)
    )
)
def test_the_file_holds_every_token_of_every_document(tmp_path_factory, contents):
    file = tokenise(tmp_path_factory.mktemp("corpus"), contents)
    kept = [content for content in contents if content.strip()]
    expected = [id_ for content in kept for id_ in (*content.encode(), END)]
    assert file.open().tolist() == expected
    assert (file.tokens, file.documents, file.largest_token) == (len(expected), len(kept), END)


def test_pieces_of_a_document_are_joined_without_a_mark(tmp_path):
    content = "Some words on a line.\n" * 50
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': content})}\n" * 2)
    documents = load_documents(survey_files(tmp_path), cache_dir=tmp_path / ".cache", piece_characters=40)
    file = write_tokens(documents, TOKENIZER, tmp_path / "tokens.bin")
    assert file.documents == 2
    assert file.open().tolist() == [*content.encode(), END] * 2


def test_ids_take_two_bytes_or_four(tmp_path):
    small = word_tokenizer({"?": 0, "a": 1, "z": 65_535}, eos_token="?")
    large = word_tokenizer({"?": 0, "a": 1, "z": 65_536}, eos_token="?")
    two, four = tokenise(tmp_path, ["a z"], small), tokenise(tmp_path, ["a z"], large)
    assert (two.dtype, two.open().tolist(), two.largest_token) == ("<u2", [1, 65_535, 0], 65_535)
    assert (four.dtype, four.open().tolist(), four.largest_token) == ("<u4", [1, 65_536, 0], 65_536)
    assert two.path.stat().st_size == 6
    assert four.path.stat().st_size == 12


def test_documents_begin_as_the_tokenizer_begins_them(tmp_path):
    tokenizer = word_tokenizer({"?": 0, "a": 1, "<s>": 2, "</s>": 3}, bos_token="<s>", eos_token="</s>")
    assert tokenise(tmp_path, ["a a", "a"], tokenizer).open().tolist() == [2, 1, 1, 3, 2, 1, 3]


def test_without_an_end_of_text_token_the_next_best_is_taken(tmp_path, caplog):
    words = {"?": 0, "a": 1, "<s>": 2, "[SEP]": 4}
    assert tokenise(tmp_path, ["a"], word_tokenizer(words, sep_token="[SEP]")).open().tolist() == [1, 4]
    assert tokenise(tmp_path, ["a"], word_tokenizer(words, bos_token="<s>")).open().tolist() == [2, 1, 2]
    assert not caplog.records
    assert tokenise(tmp_path, ["a", "a"], word_tokenizer(words)).open().tolist() == [1, 1]
    assert "no end-of-text token" in caplog.text


def test_truncation_set_in_the_tokenizer_loses_no_token(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert tokenise(tmp_path, ["a long text", "b"], tokenizer).open().tolist() == [*b"a long text", END, *b"b", END]


def test_tokens_are_made_once_for_the_same_text_and_tokenizer(tmp_path, caplog):
    first = tokenise(tmp_path, ["one", "two"])
    made = first.path.stat().st_mtime_ns
    assert tokenise(tmp_path, ["one", "two"]) == first
    assert first.path.stat().st_mtime_ns == made
    assert tokenise(tmp_path, ["one", "tow"]).path != first.path
    other = byte_tokenizer()
    other.add_tokens(["tw"])
    assert tokenise(tmp_path, ["one", "two"], other).open().tolist() == [*b"one", END, 258, ord("o"), END]
    assert not list((tmp_path / ".cache").glob("documents-*")), "the text is needed only until it is tokenised"
    assert not caplog.records


def test_those_who_ask_at_the_same_time_get_the_same_file(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("text " * 10_000)
    survey = survey_files(tmp_path)

    def ask(_: int) -> TokenFile:
        return tokenise_files(survey, tokenizer=byte_tokenizer(), text_field="text", cache_dir=tmp_path / ".cache")

    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as pool:
        files = list(pool.map(ask, range(4)))
    assert files[0].open().tolist() == [*b"text " * 10_000, END]
    assert files == [files[0]] * 4
    assert caplog.text.count("tokenising 48.8 KiB in 1 files") == 1


@pytest.mark.parametrize("damaged", [".bin", ".json"])
def test_a_damaged_file_is_made_again(tmp_path, caplog, damaged):
    first = tokenise(tmp_path, ["one", "two"])
    whole = {suffix: first.path.with_suffix(suffix).read_bytes() for suffix in (".bin", ".json")}
    first.path.with_suffix(damaged).write_bytes(b"x" + whole[damaged][1:])
    with caplog.at_level(logging.WARNING):
        assert tokenise(tmp_path, ["one", "two"]) == first
    assert "tokenised again" in caplog.text
    assert {suffix: first.path.with_suffix(suffix).read_bytes() for suffix in whole} == whole


def test_text_left_behind_in_a_power_cut_is_read_again(tmp_path, monkeypatch):
    class PowerCutError(Exception):
        """The moment at which the process is gone."""

    def cut(*_: object) -> TokenFile:
        shutil.copytree(tmp_path / ".cache", tmp_path / ".left")
        raise PowerCutError

    with monkeypatch.context() as patched:
        patched.setattr("greedysnake.data.tokens.write_tokens", cut)
        with pytest.raises(PowerCutError):
            tokenise(tmp_path, ["one", "two"])
    shutil.copytree(tmp_path / ".left", tmp_path / ".cache", dirs_exist_ok=True)  # nobody could clean up
    left = [path for path in (tmp_path / ".cache").glob("documents-*/**/*") if path.is_file()]
    assert left, "the text is copied before it is tokenised"
    for path in left:
        path.write_bytes(b"")  # a name may reach the disk before what was written
    assert tokenise(tmp_path, ["one", "two"]).open().tolist() == [*b"one", END, *b"two", END]


@pytest.mark.parametrize("kind", ["text", "records"])
def test_an_interrupt_leaves_nothing_in_the_cache(tmp_path, monkeypatch, kind):
    def interrupted(*_: object) -> None:
        assert len(list(cache.glob("*.unfinished"))) > 1
        assert bool(list(cache.glob("documents-*"))) == (kind == "text")
        raise KeyboardInterrupt

    def records() -> TokenFile:
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"prompt": "one", "completion": "two"}))
        return tokenise_examples(
            survey_files(path), "completion", RecordFormat(), tokenizer=byte_tokenizer(), cache_dir=cache
        )

    cache = tmp_path / ".cache"
    make, call = {
        "text": (lambda: tokenise(tmp_path, ["one", "two"]), "tokens.encode"),
        "records": (records, "examples.encode_spans"),
    }[kind]
    monkeypatch.setattr(f"greedysnake.data.{call}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_cache_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a\.txt/cache: the tokens cannot be kept there .* choose another cache"):
        tokenise_files(
            survey_files(tmp_path),
            tokenizer=TOKENIZER,
            text_field="text",
            cache_dir=tmp_path / "a.txt" / "cache",
        )


@given(count=st.integers(0, 400), length=st.integers(2, 50))
def test_packing_loses_only_the_tail(count, length):
    tokens = np.arange(count, dtype=np.uint16)
    if count < length:
        with pytest.raises(DataError, match=rf"corpus: {count} tokens found, a sequence needs {length}; add text"):
            pack(tokens, length, source="corpus")
        return
    packed = pack(tokens, length, source="corpus")
    rows = [packed.row(number).ids.tolist() for number in range(len(packed))]
    assert [len(row) for row in rows] == [length] * (count // length)
    assert [id_ for row in rows for id_ in row] == list(range(count - count % length))
    assert packed.dropped_tokens == count % length
    assert packed.tokens + packed.dropped_tokens == count


def test_a_sequence_needs_two_tokens():
    with pytest.raises(DataError, match="sequence_length is 1; at least 2"):
        pack(np.arange(9, dtype=np.uint16), 1, source="corpus")


@given(count=st.integers(2, 300), share=st.floats(0, 0.99), seed=st.integers(0, 2**64))
def test_split_shares_every_sequence_out_once(count, share, seed):
    packed = pack(np.arange(2 * count, dtype=np.uint16), 2, source="corpus")
    wanted = max(1, round(share * count)) if share else 0
    if wanted >= count:
        with pytest.raises(DataError, match="leaves none for training"):
            split_for_evaluation(packed, eval_share=share, seed=seed)
        return
    training, held_out = split_for_evaluation(packed, eval_share=share, seed=seed)
    assert len(held_out) == wanted
    assert sorted([*training.rows, *held_out.rows]) == list(range(count))
    again = split_for_evaluation(packed, eval_share=share, seed=seed)
    assert again[0].rows.tolist() == training.rows.tolist()
    assert again[1].rows.tolist() == held_out.rows.tolist()


def test_split_depends_on_the_seed():
    packed = pack(np.arange(400, dtype=np.uint16), 2, source="corpus")
    splits = {tuple(split_for_evaluation(packed, eval_share=0.1, seed=seed)[1].rows) for seed in range(10)}
    assert len(splits) == 10


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_an_eval_share_out_of_range_is_an_error(share):
    packed = pack(np.arange(400, dtype=np.uint16), 2, source="corpus")
    with pytest.raises(DataError, match=rf"eval_share is {share}; it must be at least 0 and below 1"):
        split_for_evaluation(packed, eval_share=share, seed=0)


@given(count=st.integers(1, 40), seed=st.integers(0, 2**32), start=st.integers(0, 200), length=st.integers(0, 100))
def test_any_stretch_of_the_order_is_that_stretch_of_whole_epochs(count, seed, start, length):
    epochs = -(-(start + length) // count)
    whole = np.concatenate([EpochOrder(count, seed).take(count * epoch, count) for epoch in range(epochs + 1)])
    for epoch in range(epochs):
        assert sorted(whole[count * epoch : count * (epoch + 1)]) == list(range(count))
    assert EpochOrder(count, seed).take(start, length).tolist() == whole[start : start + length].tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(EpochOrder(50, seed).take(50 * epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_permutations_are_those_of_every_release():
    # Written down: a run begun with an older release and resumed with this one must find the same order.
    assert stable_permutation(8, (0, 1, 0)).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]
    assert stable_permutation(8, (2**40, 1, 3)).tolist() == [5, 0, 1, 4, 3, 2, 7, 6]
