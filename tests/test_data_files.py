"""Finding text files and reading their documents."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.data import load_documents, survey_files
from greedysnake.data.sources import cut_into_pieces
from greedysnake.errors import DataError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(paths, cache_dir: Path, **options) -> list[str]:
    """The documents under ``paths``, their pieces joined."""
    documents: list[str] = []
    for row in load_documents(survey_files(paths), cache_dir=cache_dir, **options):
        if row["document"] == len(documents):
            documents.append("")
        assert row["document"] == len(documents) - 1
        documents[-1] += row["text"]
    return documents


def test_each_text_file_is_one_document_exactly_as_it_is(tmp_path):
    content = "First line\r\nsecond \u2028 line\rthird\n\n  é 🐍\t"
    for suffix in (".txt", ".md", ".py", ".rst", ""):
        path = write(tmp_path / f"file{suffix}", content)
        assert texts(path, tmp_path / "cache") == [content]
        assert texts(str(path), tmp_path / "cache") == [content]


def test_byte_order_mark_is_not_text(tmp_path):
    assert texts(write(tmp_path / "a.txt", "\ufeffabc"), tmp_path / "cache") == ["abc"]
    assert texts(write(tmp_path / "a.jsonl", '\ufeff{"text": "abc"}'), tmp_path / "cache") == ["abc"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".ndjson", ".JSONL"])
def test_each_json_line_is_one_document(tmp_path, suffix):
    lines = [
        {"id": 1, "text": "one\ntwo"},
        {"text": "é \u2028 🐍"},
        {"text": "  \n"},
        {"text": ""},
        {"text": "end"},
    ]
    raw = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n"
    path = write(tmp_path / f"a{suffix}", raw)
    assert texts(path, tmp_path / "cache") == ["one\ntwo", "é \u2028 🐍", "end"]


def test_text_field_is_chosen(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"content": "x", "text": "y"}\n')
    assert texts(path, tmp_path / "cache", text_field="content") == ["x"]
    assert texts(path, tmp_path / "cache", text_field="text") == ["y"]


def test_folder_is_read_in_the_order_of_names_without_hidden_files(tmp_path):
    corpus = tmp_path / "corpus"
    names = ["b.txt", "a/z.txt", "a/b/c.md", "c.jsonl", ".hidden.txt", ".git/config", "a/.x/y.txt", "B.txt"]
    for name in names:
        write(corpus / name, f'{{"text": "{name}"}}' if name.endswith("jsonl") else name)
    write(corpus / "empty.txt", " \n")
    survey = survey_files(corpus)
    assert [file.path.relative_to(corpus).as_posix() for file in survey.files] == [
        "B.txt",
        "a/b/c.md",
        "a/z.txt",
        "b.txt",
        "c.jsonl",
    ]
    assert survey.empty == (corpus / "empty.txt",)
    assert survey.size_bytes == sum(file.path.stat().st_size for file in survey.files)
    assert texts(corpus, tmp_path / "cache") == ["B.txt", "a/b/c.md", "a/z.txt", "b.txt", "c.jsonl"]


def test_paths_keep_their_order_and_a_file_counts_once(tmp_path):
    b, a = write(tmp_path / "d" / "b.txt", "b"), write(tmp_path / "d" / "a.txt", "a")
    (tmp_path / "d" / "link.txt").symlink_to(a)
    assert [file.path for file in survey_files([b, tmp_path / "d", str(b)]).files] == [b, a]


def test_what_is_not_text_is_skipped_in_a_folder_and_told(tmp_path, caplog):
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "latin.txt", "é".encode("latin-1"))
    write(tmp_path / "model.bin", b"abc\0def")
    with caplog.at_level(logging.WARNING):
        survey = survey_files(tmp_path)
    assert survey.not_text == (tmp_path / "latin.txt", tmp_path / "model.bin")
    assert "2 of 3 files are not UTF-8 text and were skipped" in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ab\xff", "not UTF-8 (invalid start byte at byte 2)"),
        (b"a" * (2**20 - 1) + b"\xc3", "not UTF-8 (unexpected end of data at byte 1048575)"),
        (b"a" * (2**20 - 1) + b"\xc3A", "not UTF-8 (invalid continuation byte at byte 1048575)"),
        (b"ab\0", "not text (a zero byte at byte 2)"),
    ],
)
def test_a_named_file_that_is_not_text_is_an_error(tmp_path, content, reason):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(DataError) as caught:
        survey_files(path)
    assert str(caught.value).startswith(f"{path}: {reason}; convert it to UTF-8")


def test_a_character_across_two_blocks_is_read(tmp_path):
    content = "a" * (2**20 - 1) + "é"
    assert texts(write(tmp_path / "a.txt", content), tmp_path / "cache") == [content]


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(DataError) as caught:
        survey_files(path)
    assert str(caught.value).startswith(f"{path}: there is no text in it ({len(content)} bytes)")


def test_a_folder_without_text_is_an_error(tmp_path):
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.bin", b"\0")
    write(tmp_path / ".c.txt", "hidden")
    with pytest.raises(DataError) as caught:
        survey_files(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: no text found (1 files are not UTF-8 text, 1 are empty")


def test_missing_and_odd_paths_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"absent\.txt: not found; check the path"):
        survey_files([tmp_path / "absent.txt"])
    with pytest.raises(DataError, match="no data paths are given"):
        survey_files([])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: neither a file nor a folder"):
        survey_files(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "not valid JSON (Expecting ',' delimiter"),
        ("[1]", "a JSON object is needed, a list was found"),
        ("3", "a JSON object is needed, a number was found"),
        ('{"body": "x", "id": 3}', "no field 'text' (fields found: 'body', 'id'); set text_field"),
        ("{}", "no field 'text' (fields found: none)"),
        ('{"text": null}', "field 'text' holds null, text is needed"),
        ('{"text": ["x"]}', "field 'text' holds a list, text is needed"),
        ('{"text": {"a": 1}}', "field 'text' holds an object, text is needed"),
        ('{"text": "ab\\ud83d"}', "field 'text' has half a surrogate pair at character 2"),
        ("[" * 100_000, "not valid JSON (maximum recursion depth"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        load_documents(survey_files(path), cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(f"{path}, line 3: {message}")


def test_one_json_document_over_many_lines_is_an_error(tmp_path):
    path = write(tmp_path / "a.json", json.dumps([{"text": "x"}], indent=2))
    with pytest.raises(DataError, match=r"a\.json, line 1: not valid JSON .* put each document on a line of its own"):
        load_documents(survey_files(path), cache_dir=tmp_path / "cache")


def test_json_lines_without_any_text_are_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": ""}\n{"text": " "}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: every document is empty"):
        load_documents(survey_files(path), cache_dir=tmp_path / "cache")


def test_a_file_changed_after_the_survey_is_an_error(tmp_path):
    path = write(tmp_path / "a.txt", "x")
    survey = survey_files(path)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read any more"):
        load_documents(survey, cache_dir=tmp_path / "cache")


def test_changed_text_is_never_taken_from_the_cache(tmp_path):
    path = write(tmp_path / "a.txt", "old")
    status = path.stat()
    assert texts(path, tmp_path / "cache") == ["old"]
    write(path, "new")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert texts(path, tmp_path / "cache") == ["new"]
    # The same bytes are other documents under another suffix.
    assert texts(write(tmp_path / "b.txt", '{"text": "x"}'), tmp_path / "cache") == ['{"text": "x"}']
    assert texts(write(tmp_path / "b.jsonl", '{"text": "x"}'), tmp_path / "cache") == ["x"]


def test_long_documents_are_rows_of_bounded_size(tmp_path):
    content = "Some words on a line.\n" * 300
    write(tmp_path / "a.txt", content)
    write(tmp_path / "b.jsonl", json.dumps({"text": content}))
    write(tmp_path / "c.txt", " " * 100 + "x")
    documents = load_documents(survey_files(tmp_path), cache_dir=tmp_path / "cache", piece_characters=50)
    assert max(len(text) for text in documents["text"]) <= 50
    joined = ["", "", ""]
    for row in documents:
        joined[row["document"]] += row["text"]
    assert joined == [content, content, " " * 100 + "x"]


@settings(max_examples=200)
@given(
    blocks=st.lists(st.text(st.sampled_from("ab \n\ré🐍")), max_size=8),
    limit=st.integers(1, 9),
)
def test_pieces_are_the_text_and_within_the_limit(blocks, limit):
    pieces = list(cut_into_pieces(blocks, limit))
    assert "".join(pieces) == "".join(blocks)
    assert all(0 < len(piece) <= limit for piece in pieces)


def test_pieces_end_where_tokens_end():
    assert list(cut_into_pieces(["one\ntwo\n\nthree four"], 12)) == ["one\n", "two\n\nthree", " four"]
    assert list(cut_into_pieces(["one two\n\n  \nthree"], 12)) == ["one", " two\n\n  \n", "three"]
    assert list(cut_into_pieces(["abcdefgh"], 3)) == ["abc", "def", "gh"]


def test_nothing_is_written_outside_the_cache_folder_or_to_the_terminal(tmp_path):
    write(tmp_path / "corpus" / "a.txt", "text")
    home = tmp_path / "home"
    home.mkdir()
    program = f"""
from pathlib import Path
import datasets
from greedysnake.data import load_documents, survey_files
load_documents(survey_files({str(tmp_path / "corpus")!r}), cache_dir=Path({str(tmp_path / "cache")!r}))
assert not datasets.are_progress_bars_disabled()
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert list(home.rglob("*")) == []
    assert (done.stdout, done.stderr) == ("", "")
