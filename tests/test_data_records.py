"""Chats, completions and text out of JSON lines, Parquet and saved datasets; and what is wrong with them."""

import json
import logging
import re
from pathlib import Path

import chat_templates as templates
import datasets
import pyarrow
import pytest
from chat_templates import chat_tokenizer
from pyarrow import parquet

from greedysnake.data import RecordFormat, TokenBatches, load_data, survey_files, tokenise_examples
from greedysnake.data.formats import files_of_format, find_format
from greedysnake.data.records import Problems
from greedysnake.data.splits import split_of
from greedysnake.errors import DataError, ModelError

TOKENIZER = chat_tokenizer(templates.MARKED)
END = "<|endoftext|>"


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]


CHATS = [{"messages": chat("Hi", "Hello.")}, {"messages": chat("Why?", "So.", "Really?", "Yes.")}]
COMPLETIONS = [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "2 + 2 =", "completion": " 4"}]


def write_lines(path: Path, records: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def write_parquet(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def load(train, tmp_path: Path, **changes) -> TokenBatches:
    options = {
        "train": train,
        "tokenizer": TOKENIZER,
        "sequence_length": 128,
        "micro_batch_size": 1,
        "micro_batches": 1,
        "seed": 0,
        "packing": "none",
        "cache_dir": tmp_path / "cache",
    }
    return load_data(**options | changes)


def learnt(batches: TokenBatches, tokenizer=TOKENIZER) -> list[tuple[str, str]]:
    """Each sequence of an epoch as text, and what of it is learnt; in the order of the text."""
    found = []
    for number in range(len(batches.training)):
        row = batches.training.row(number)
        found.append((tokenizer.decode(row.ids), tokenizer.decode(row.ids[row.learnt])))
    return found


def saved(records: list[dict]):
    return datasets.Dataset.from_list(records)


CHATS_LEARNT = [
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n", "Hello.<|im_end|>"),
    (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
        "<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n",
        "So.<|im_end|>Yes.<|im_end|>",
    ),
]


def make_files(kind: str, records: list[dict], folder: Path) -> Path:
    """``records`` as a file or folder of some kind."""
    if kind == "json lines":
        return write_lines(folder / "data.jsonl", records)
    if kind == "parquet":
        return write_parquet(folder / "data.parquet", records)
    if kind == "saved":
        saved(records).save_to_disk(folder / "saved")
        return folder / "saved"
    if kind == "saved, chosen rows":
        saved([*records[::-1], *records]).select(range(len(records), 2 * len(records))).save_to_disk(folder / "saved")
        return folder / "saved"
    if kind == "saved splits":
        both = {"train": saved(records), "test": saved(records[:1])}
        datasets.DatasetDict(both).save_to_disk(folder / "both")
        return folder / "both"
    write_parquet(folder / "hub" / "data" / "train-00000-of-00001.parquet", records)
    write_parquet(folder / "hub" / "data" / "test-00000-of-00001.parquet", records[:1])
    (folder / "hub" / "README.md").write_text("# A dataset\n")
    (folder / "hub" / "dataset_infos.json").write_text('{\n "default": {}\n}')
    return folder / "hub"


KINDS = ["json lines", "parquet", "saved", "saved, chosen rows", "saved splits", "folder of splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_chats_of_every_kind_of_file(tmp_path, kind):
    batches = load(make_files(kind, CHATS, tmp_path), tmp_path)
    assert (batches.report.format, batches.report.documents) == ("chat", 2)
    assert learnt(batches) == CHATS_LEARNT
    assert batches.report.targets == sum(len(TOKENIZER(text)["input_ids"]) for _, text in CHATS_LEARNT)


@pytest.mark.parametrize("kind", KINDS)
def test_completions_of_every_kind_of_file(tmp_path, kind):
    batches = load(make_files(kind, COMPLETIONS, tmp_path), tmp_path)
    assert batches.report.format == "completion"
    assert learnt(batches) == [("1 + 1 = 2" + END, " 2" + END), ("2 + 2 = 4" + END, " 4" + END)]


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_text_of_every_kind_of_file(tmp_path, kind):
    batches = load(make_files(kind, [{"text": "one", "id": 1}, {"text": "two", "id": 2}], tmp_path), tmp_path)
    assert batches.report.format == "text"
    assert learnt(batches) == [("one" + END, "ne" + END), ("two" + END, "wo" + END)]


def test_a_tokenizer_that_begins_texts_begins_completions_and_nothing_is_said_twice(tmp_path):
    from tokenizers import processors

    tokenizer = chat_tokenizer(None)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "<s>a", "completion": "b" + END}]
    batches = load(write_lines(tmp_path / "a.jsonl", records), tmp_path, tokenizer=tokenizer)
    assert learnt(batches, tokenizer) == [("<s>ab" + END, "b" + END)] * 2
    batches = load(write_lines(tmp_path / "b.jsonl", CHATS), tmp_path, tokenizer=chat_tokenizer(templates.PLAIN))
    assert learnt(batches) == CHATS_LEARNT, "a template writes everything itself"


def test_fields_can_have_other_names(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"instruction": "a", "output": "b", "conversation": chat("c", "d")}])
    fields = RecordFormat(prompt_field="instruction", completion_field="output")
    assert learnt(load(path, tmp_path, record_format=fields)) == [("ab" + END, "b" + END)]
    fields = RecordFormat(messages_field="conversation")
    assert learnt(load(path, tmp_path, record_format=fields))[0][1] == "d<|im_end|>"


def test_the_format_can_be_said(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", [{"text": "abc", "messages": chat("c", "d"), "prompt": "a", "completion": "b"}]
    )
    for format_, text in (("text", "bc" + END), ("chat", "d<|im_end|>"), ("completion", "b" + END)):
        assert learnt(load(path, tmp_path, record_format=RecordFormat(format=format_)))[0][1] == text
    with pytest.raises(DataError, match=r"line 1: can be text or chat or completion .*; set data\.format to one"):
        load(path, tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"body": "x"},
            r"line 1: no field 'text', or 'messages', or 'prompt' and 'completion' \(fields found: '",
        ),
        ({"conversations": []}, "rename 'conversations' to 'messages', each with 'role' and 'content'"),
        (
            {"instruction": "", "output": ""},
            r"set data\.prompt_field to instruction and data\.completion_field to",
        ),
        ({"question": "", "answer": ""}, r"set data\.prompt_field to question and data\.completion_field to answer"),
    ],
)
def test_records_of_another_layout_are_told_what_to_do(tmp_path, record, message):
    with pytest.raises(DataError, match=message):
        load(write_lines(tmp_path / "a.jsonl", [record]), tmp_path)


def test_files_of_several_kinds_are_an_error(tmp_path):
    write_lines(tmp_path / "d" / "a.jsonl", CHATS)
    write_lines(tmp_path / "d" / "b.jsonl", COMPLETIONS)
    with pytest.raises(DataError, match=r"several kinds: .*a\.jsonl holds chats, .*b\.jsonl holds completions; name"):
        load(tmp_path / "d", tmp_path)


def test_plain_text_beside_records(tmp_path, caplog):
    write_lines(tmp_path / "d" / "a.jsonl", CHATS)
    readme = tmp_path / "d" / "README.md"
    readme.write_text("About the chats")
    with caplog.at_level(logging.WARNING):
        assert learnt(load(tmp_path / "d", tmp_path)) == CHATS_LEARNT
    assert "1 files of plain text lie among chats and were left out, the first is" in caplog.text
    with pytest.raises(DataError, match=r"README\.md: plain text among chats; put it into records"):
        load([tmp_path / "d" / "a.jsonl", readme], tmp_path)
    with pytest.raises(DataError, match=r"README\.md: plain text among chats"):
        load(readme, tmp_path, record_format=RecordFormat(format="chat"))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt: chats come from JSON lines, Parquet or saved datasets, and"):
        load(tmp_path / "t", tmp_path, record_format=RecordFormat(format="chat"))


def test_every_bad_record_is_named_at_once(tmp_path):
    good = {"messages": chat("Hi", "Hello.")}
    path = tmp_path / "a.jsonl"
    bad = [
        json.dumps(good),
        '{"messages": ',
        json.dumps({"text": "x"}),
        "",
        json.dumps({"messages": "Hi"}),
        json.dumps({"messages": chat("Hi")}),
        json.dumps({"messages": [{"role": "user", "content": 3}]}),
        json.dumps(good),
        json.dumps({"messages": chat("Hi", "a\ud83d")}),
        json.dumps({**good, "tools": "{"}),
    ]
    path.write_text("\n".join(bad))
    with pytest.raises(DataError) as caught:
        load(path, tmp_path)
    lines = str(caught.value).split("\n")
    assert [int(re.search(r"line (\d+)", line)[1]) for line in lines] == [2, 3, 5, 6, 7, 9, 10]
    for line, words in zip(
        lines,
        [
            "not valid JSON",
            "no field 'messages' (fields found: 'text'); set messages_field",
            "field 'messages': a list of messages is needed, a string was found",
            "field 'messages': no message has the role 'assistant'",
            "field 'messages': message 1 has a number as its 'content', text is needed",
            "has half a surrogate pair at character ",
            "field 'tools' is not valid JSON",
        ],
        strict=True,
    ):
        assert line.startswith(f"{path}, line ")
        assert words in line
    assert not list((tmp_path / "cache").glob("*.bin")), "nothing is kept of data with mistakes"


def test_bad_completions_and_rows_are_named(tmp_path):
    records = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": " "},
        {"prompt": None, "completion": "b"},
        {"prompt": "a", "completion": "b"},
    ]
    path = write_parquet(tmp_path / "a.parquet", records)
    with pytest.raises(DataError) as caught:
        load(path, tmp_path)
    assert str(caught.value).split("\n") == [
        f"{path}, row 2: field 'completion' is empty, so there is nothing to learn",
        f"{path}, row 3: field 'prompt' holds null, text is needed",
    ]
    path = write_lines(tmp_path / "b.jsonl", [{"prompt": chat("a"), "completion": "b"}])
    with pytest.raises(DataError, match="field 'prompt' holds a list, text is needed; write conversations as messages"):
        load(path, tmp_path)


def test_no_more_problems_than_a_person_reads(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}, *[{"text": n} for n in range(50)]])
    with pytest.raises(DataError) as caught:
        load(path, tmp_path)
    lines = str(caught.value).split("\n")
    assert len(lines) == 21
    assert lines[19].startswith(f"{path}, line 21: field 'text' holds a number")
    assert lines[20] == "These are the first 20 problems; there may be more."


def test_problems_are_looked_for_in_so_many_records_only():
    problems = Problems(most=3, further=2)
    for _ in range(10):
        problems.passed()
    problems.settle()
    assert not problems
    problems.add("one")
    problems.passed()
    problems.add("two")
    problems.passed()
    assert problems
    with pytest.raises(DataError, match="one\ntwo\nThe 2 records after the first problem were looked at, no more"):
        problems.passed()
    with pytest.raises(DataError, match=r"^one\ntwo$"):
        problems.settle()
    with pytest.raises(DataError, match="one\ntwo\nthree\nThese are the first 3 problems"):
        problems.add("three")


def test_a_damaged_table_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", COMPLETIONS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet .*; write the file again"):
        load(path, tmp_path)
    saved(COMPLETIONS).save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:40])
    with pytest.raises(DataError, match=r"saved: looks like a folder of datasets' save_to_disk, but cannot be loaded"):
        load(tmp_path / "saved", tmp_path)


def test_an_empty_table_is_an_error(tmp_path):
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: there is no text in it"):
        survey_files(tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl", CHATS)
    assert survey_files(tmp_path).empty == (tmp_path / "a.parquet",)


def test_names_tell_training_from_evaluation(tmp_path, caplog):
    for name in ("train", "extra", "validation", "test-1"):
        write_lines(tmp_path / "d" / f"{name}.jsonl", CHATS)
    (tmp_path / "d" / "test.txt").write_text("plain text is not told by its name")

    def names(role) -> list[str]:
        return [file.path.stem for file in survey_files(tmp_path / "d", role).files if file.kind != "text"]

    assert names(None) == ["extra", "test-1", "train", "validation"]
    with caplog.at_level(logging.WARNING):
        assert names("train") == ["extra", "train"]
    assert "2 files are, by their names, not for training and were left out, the first is" in caplog.text
    assert names("evaluation") == ["validation"]
    (tmp_path / "d" / "validation.jsonl").unlink()
    assert names("evaluation") == ["test-1"]
    (tmp_path / "d" / "test-1.jsonl").unlink()
    assert names("evaluation") == ["extra", "train"], "a folder with nothing else was named on purpose"
    assert [file.path for file in survey_files(tmp_path / "d" / "train.jsonl", "evaluation").files]


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("data/train-00000-of-00002.parquet", "train"),
        ("validation/part.parquet", "validation"),
        ("my_dev_set.jsonl", "validation"),
        ("TEST.json", "test"),
        ("train/eval.jsonl", "test"),
        ("training.jsonl", "train"),
        ("latest.jsonl", None),
        ("trainer.jsonl", None),
        ("a/b.jsonl", None),
    ],
)
def test_split_of_a_name(path, split):
    assert split_of(Path(path)) == split


def test_a_saved_folder_of_splits_serves_both_roles(tmp_path):
    folder = make_files("saved splits", CHATS, tmp_path)
    batches = load(folder, tmp_path, evaluation=folder)
    assert batches.sequences == 2
    assert batches.evaluation_sequences == 1


def test_tokens_of_examples_are_made_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", CHATS)

    def tokens(tokenizer=TOKENIZER, wanted: RecordFormat | None = None, source: Path = path):
        wanted = wanted or RecordFormat()
        survey = survey_files(source)
        format_ = find_format(survey, wanted)
        return tokenise_examples(
            files_of_format(survey, format_), format_, wanted, tokenizer=tokenizer, cache_dir=tmp_path / "cache"
        )

    first = tokens()
    made = {suffix: first.path.with_suffix(suffix).stat().st_mtime_ns for suffix in (".bin", ".starts", ".targets")}
    assert tokens() == first
    assert {suffix: first.path.with_suffix(suffix).stat().st_mtime_ns for suffix in made} == made
    assert tokens(chat_tokenizer(templates.PLAIN)).path != first.path
    for damaged in made:
        whole = first.path.with_suffix(damaged).read_bytes()
        first.path.with_suffix(damaged).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert tokens() == first
        assert first.path.with_suffix(damaged).read_bytes() == whole
        first.path.with_suffix(damaged).unlink()
        assert tokens() == first


def test_chats_need_a_template_and_a_fast_tokenizer(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", CHATS)
    with pytest.raises(ModelError, match="the tokenizer has no chat template"):
        load(path, tmp_path, tokenizer=chat_tokenizer(None))
