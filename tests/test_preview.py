"""What `greedysnake preview` shows of a step's data."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from greedysnake.cli.app import main
from greedysnake.cli.inputs import prepare_inputs
from greedysnake.cli.preview import describe_preview, show_preview
from greedysnake.config import load_config
from greedysnake.data import byte_tokenizer
from greedysnake.engine.batches import target_tokens

ROOT = Path(__file__).parent.parent
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Settings of a small run on twelve chats, some longer than the others."""
    lines = []
    for number in range(12):
        said = [("user", f"Question {number}?"), ("assistant", f"Answer {number}" + "." * number)]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    settings = {
        "run": str(tmp_path / "run"),
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 258,
            }
        },
        "data": {
            "train": str(tmp_path / "chats.jsonl"),
            "chat_template": str(ROOT / "examples" / "chat.jinja"),
            "sequence_length": 160,
        },
        "training": {"steps": 3, "micro_batches": 2, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-3},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def shown(config: Path, *overrides: str, step: int = 0, rows: int | None = None, full: bool = False, **console) -> str:
    out = Console(highlight=False, width=80, record=True, **console)
    with out.capture() as captured:
        show_preview(load_config(config, overrides), step, out, most_rows=rows, full=full)
    return captured.get()


@pytest.mark.parametrize("packing", ["documents", "whole", "none"])
@pytest.mark.parametrize("step", [0, 5])
def test_the_numbers_and_the_text_are_those_of_the_batch(config, packing, step):
    settings = load_config(config, [f"data.packing={packing}"])
    described = describe_preview(settings, step)
    batches = prepare_inputs(settings, config.parent / "cache").batches
    batch = batches.step(step)
    assert described["step"] == step
    assert described["data"]["packing"] == packing
    assert described["data"]["targets"] == batches.report.targets
    assert described["data"]["sequences"] == batches.sequences
    assert described["learnt"] == target_tokens(batch)
    assert described["tokens"] + described["padding"] == sum(part["input_ids"].numel() for part in batch)
    tokenizer = byte_tokenizer()
    for rows, part in zip(described["micro_batches"], batch, strict=True):
        for row, ids, labels in zip(rows, part["input_ids"], part["labels"], strict=True):
            parts = [part for document in row["documents"] for part in document["parts"]]
            assert "".join(part["text"] for part in parts) == tokenizer.decode(ids[: row["tokens"]])
            labels[0] = -100
            learnt = "".join(part["text"] for part in parts if part["learnt"])
            assert learnt == tokenizer.decode(ids[labels != -100])
            for document in row["documents"]:
                assert document["tokens"] == sum(part["tokens"] for part in document["parts"])
                assert document["learnt"] == sum(part["tokens"] for part in document["parts"] if part["learnt"])
    if packing != "whole":
        documents = [d for rows in described["micro_batches"] for row in rows for d in row["documents"]]
        assert all(d["parts"][0]["text"].startswith("### user\n") for d in documents)
        assert all("Answer" in part["text"] for d in documents for part in d["parts"] if part["learnt"])


def test_what_is_learnt_is_in_brackets_without_a_terminal(config):
    output = shown(config, force_terminal=False)
    assert "\x1b" not in output
    assert "shown in [[ ]]" in output
    answers = re.findall(r"\[\[(Answer \d+\.*<\|endoftext\|>)\]\]", output.replace("\n", ""))
    assert len(answers) == sum(
        len(row["documents"]) for rows in describe_preview(load_config(config), 0)["micro_batches"] for row in rows
    )
    assert "─" in output, "borders between documents"
    assert "padding" in output
    assert max(map(len, output.splitlines())) <= 80
    assert not re.search(r"\[\[[^]]*Question", output)


def test_what_is_learnt_is_green_on_a_terminal(config, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = shown(config, force_terminal=True, color_system="standard")
    assert "[[" not in output
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", output)
    assert green[0] == "green"
    assert all("Question" not in part for part in green)
    assert sum("Answer" in part for part in green) == ANSI.sub("", output).count("Answer ")
    assert shown(config, force_terminal=True, no_color=True).count("[[") > 1


def test_long_texts_and_many_rows_are_shortened(config):
    assert shown(config, rows=1).count("═") < shown(config).count("═")
    assert "3 more sequences in this step; --rows 0 shows all." in shown(config, rows=1)
    long = json.dumps({"prompt": "a" * 1300, "completion": "b" * 500})
    (config.parent / "chats.jsonl").write_text(long)
    overrides = ["data.sequence_length=2048", "training.micro_batches=1", "training.micro_batch_size=1"]
    assert "700 more" in shown(config, *overrides)
    assert "more characters" not in shown(config, *overrides, full=True)


def test_nothing_in_the_data_reaches_the_terminal_as_a_command(config):
    record = {"prompt": "a\x1b[31m[bold]x[/bold]\x07", "completion": "\x9b\u202eb"}
    (config.parent / "chats.jsonl").write_text(json.dumps(record))
    output = shown(config, force_terminal=True, color_system=None)
    assert "\\x1b[31m[bold]x[/bold]\\x07" in output
    assert "\\u202e" in output
    assert not set(output) & set("\x1b\x07\x9b\u202e")


def test_documents_of_text_end_at_their_end_token(config):
    (config.parent / "chats.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    overrides = ["data.sequence_length=7", "training.micro_batches=1", "training.micro_batch_size=1"]
    texts = [
        "".join(part["text"] for part in document["parts"])
        for step in range(2)
        for document in describe_preview(load_config(config, overrides), step)["micro_batches"][0][0]["documents"]
    ]
    assert sorted(texts) == ["<|endoftext|>", "one<|endoftext|>", "three<|endoftext|>", "two"]


def run(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["greedysnake", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def test_the_command_makes_no_run_folder_and_tells_of_mistakes(config, monkeypatch, capsys):
    status, output, errors = run(monkeypatch, capsys, "preview", config, "--json", "--step", 2)
    assert status == 0, errors
    assert json.loads(output) == describe_preview(load_config(config), 2)
    status, output, _ = run(monkeypatch, capsys, "preview", config, "data.packing=none", "--rows", 1)
    assert status == 0
    assert "Each holds one of the chats" in " ".join(output.split())
    assert not (config.parent / "run").exists()
    (config.parent / "chats.jsonl").write_text('{"messages": []}\n{"messages": 3}\n')
    status, _, errors = run(monkeypatch, capsys, "preview", config)
    assert status == 1
    assert "chats.jsonl, line 1: field 'messages'" in errors
    assert "chats.jsonl, line 2: field 'messages'" in errors
    assert "Traceback" not in errors


def test_a_cache_folder_is_shared_with_training(config, monkeypatch, capsys):
    cache = config.parent / "tokens"
    status, _, errors = run(monkeypatch, capsys, "preview", config, f"data.cache={cache}")
    assert status == 0, errors
    (made,) = cache.glob("*.bin")
    time = made.stat().st_mtime_ns
    status, _, errors = run(monkeypatch, capsys, "train", config, f"data.cache={cache}", "training.steps=1")
    assert status == 0, errors
    assert [path.stat().st_mtime_ns for path in cache.glob("*.bin")] == [time]
    assert not (config.parent / "run" / "cache").exists()


def test_a_model_that_cannot_keep_documents_apart_is_refused_before_the_run(config, monkeypatch, capsys):
    bloom = "model.config={model_type: bloom, hidden_size: 16, n_layer: 1, n_head: 2, vocab_size: 258}"
    status, _, errors = run(monkeypatch, capsys, "train", config, bloom)
    assert status == 1
    assert "models of type 'bloom' cannot keep the documents of a packed row apart" in errors
    assert not (config.parent / "run").exists()
    status, _, errors = run(monkeypatch, capsys, "train", config, bloom, "data.packing=none", "training.steps=1")
    assert status == 0, errors
