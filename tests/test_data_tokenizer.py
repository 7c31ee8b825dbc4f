"""The built-in byte tokenizer, local tokenizers, and whether they fit a model."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from greedysnake.data import byte_tokenizer, check_vocabulary, load_tokenizer
from greedysnake.errors import ModelError

TOKENIZER = byte_tokenizer()


def test_every_byte_is_the_token_of_its_value():
    assert (len(TOKENIZER), TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (258, 256, 257)
    every = bytes(range(128)).decode() + "".join(map(chr, range(0x80, 0x900, 7))) + "\u2028\uffff🐍"
    assert TOKENIZER(every)["input_ids"] == list(every.encode())
    assert TOKENIZER("a<|endoftext|>b<|pad|>")["input_ids"] == [97, 256, 98, 257]


@settings(max_examples=100)
@given(text=st.text())
def test_text_comes_back(text):
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_decoding_keeps_spaces_before_punctuation():
    assert TOKENIZER.decode(TOKENIZER(" a , b ' m  .")["input_ids"]) == " a , b ' m  ."


def test_loads_from_an_exported_model_folder(tmp_path):
    config = LlamaConfig(vocab_size=258, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    load_tokenizer("bytes").save_pretrained(tmp_path)
    text = "  Hé , 🐍<|endoftext|>"
    for loaded in (
        AutoTokenizer.from_pretrained(tmp_path),
        load_tokenizer(tmp_path),
        load_tokenizer(str(tmp_path)),
    ):
        assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (256, 257, 258)


def test_a_folder_without_a_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(ModelError, match=r"absent: no such tokenizer folder .* 'bytes' for the built-in"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="file: a file, not a tokenizer folder"):
        load_tokenizer(tmp_path / "file")
    (tmp_path / "config.json").write_text(LlamaConfig().to_json_string())
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: no tokenizer in this folder (none of tokenizer.json, ")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(tmp_path, name):
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / name).write_text((tmp_path / name).read_text()[:50])
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: its tokenizer cannot be loaded (JSONDecodeError")


def test_code_of_the_folder_is_not_run(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"})
    )
    (tmp_path / "own.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_that_fits_passes():
    check_vocabulary(TOKENIZER, 258, "tiny")
    check_vocabulary(TOKENIZER, 32000, "tiny")


@pytest.mark.parametrize("vocab_size", [257, 256, 100])
def test_a_vocabulary_too_small_for_the_tokenizer_is_an_error(vocab_size):
    with pytest.raises(ModelError) as caught:
        check_vocabulary(TOKENIZER, vocab_size, "tiny")
    assert str(caught.value).startswith(
        "tiny: the tokenizer produces ids up to 257 ('<|pad|>'), the model's vocab_size"
    )
    assert f"vocab_size is {vocab_size}; use" in str(caught.value)
    assert "vocab_size of 258 or more" in str(caught.value)


def test_only_a_rare_special_token_may_lie_outside(caplog):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with caplog.at_level(logging.WARNING):
        check_vocabulary(tokenizer, 3, "tiny")
    assert "tiny: special tokens from '<image>' on have no row in the model (vocab_size 3)" in caplog.text
    with pytest.raises(ModelError, match="ids up to 2"):
        check_vocabulary(tokenizer, 2, "tiny")
    tokenizer.add_tokens(["  "])
    with pytest.raises(ModelError, match="ids up to 4"):
        check_vocabulary(tokenizer, 3, "tiny")
