"""Metrics survive a crash in the middle of a line; JSON files are whole or untouched."""

import json
import math

import pytest

from greedysnake.errors import GreedySnakeError
from greedysnake.report.metrics import MetricsFile, read_metrics, write_json_atomic


def test_lines_are_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write({"step": 1, "loss": 2.5, "busy": {"cpu": 0.5}})
        assert read_metrics(path) == [{"step": 1, "loss": 2.5, "busy": {"cpu": 0.5}}]
        metrics.write({"step": 2, "loss": math.nan, "rates": [math.inf, 1.0], "name": "Grüße"})
    assert read_metrics(path)[1] == {"step": 2, "loss": None, "rates": [None, 1.0], "name": "Grüße"}
    assert path.read_bytes().count(b"\n") == 2


def test_a_file_cut_anywhere_keeps_its_whole_lines_and_can_be_continued(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [{"step": step, "note": "ä\n"} for step in range(3)]
    with MetricsFile(path) as metrics:
        for record in records:
            metrics.write(record)
    content = path.read_bytes()
    line_bytes = len(content) // 3
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = records[: (length + 1) // line_bytes]  # a line that only lacks its line break is whole
        assert read_metrics(path) == whole
        with MetricsFile(path) as metrics:
            metrics.write({"step": 99})
        assert read_metrics(path) == [*whole, {"step": 99}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n\n{"step": 3}\n')
    with pytest.raises(GreedySnakeError, match=r"metrics\.jsonl: line 2 "):
        read_metrics(path)
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "missing.jsonl")


def test_a_record_that_is_no_json_writes_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        with pytest.raises(TypeError):
            metrics.write({"step": object()})
        metrics.write({"step": 1})
    assert read_metrics(path) == [{"step": 1}]


def test_json_files_are_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "plan.json"
    write_json_atomic(path, {"seconds": math.inf, "shares": (0.5, 1)})
    assert json.loads(path.read_text()) == {"seconds": None, "shares": [0.5, 1]}
    with pytest.raises(TypeError):
        write_json_atomic(path, {"bad": object()})
    assert json.loads(path.read_text())["shares"] == [0.5, 1]
    write_json_atomic(path, [1])
    assert path.read_text() == "[\n  1\n]\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_no_temporary_file(tmp_path):
    folder = tmp_path / "plan.json"
    folder.mkdir()
    (folder / "kept").touch()
    with pytest.raises(OSError, match="directory"):
        write_json_atomic(folder, {})
    assert list(tmp_path.iterdir()) == [folder]
