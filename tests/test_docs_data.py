"""Every file and command on the page about data works, in the order in which a reader meets them."""

import json
import re
import sys
from pathlib import Path

import pytest

from greedysnake.cli.app import main
from greedysnake.config import load_config
from greedysnake.data import byte_tokenizer, load_data
from greedysnake.errors import DataError

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "data.md").read_text()


def test_the_files_and_commands_of_the_page_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text((ROOT / "examples" / "chat.jinja").read_text())
    written, ran = [], []
    for language, name, body in re.findall(r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL):
        if name:
            (tmp_path / name).write_text(body)
            written.append(name)
        if language != "bash":
            continue
        for line in body.splitlines():
            command = line.split("#")[0].split()
            if command[-1] == "CONFIG.yaml":
                continue
            assert command[0] == "greedysnake"
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as exit_:
                main()
            captured = capsys.readouterr()
            assert not exit_.value.code, line + captured.out + captured.err
            ran.append((command, captured.out))
    assert written == ["chats.jsonl", "completions.jsonl", "stories.jsonl", "chat.yaml"]
    previews = [output for command, output in ran if command[1] == "preview"]
    assert len(previews) == 3
    for words in ("[[Warmth.<|endoftext|>]]", "[[In burrows.<|endoftext|>]]", "### system"):
        assert words in previews[0]
    assert "[[eau<|endoftext|>]]" in previews[1]
    assert "one of the documents" in previews[2]
    assert (tmp_path / "my-chat-model" / "chat_template.jinja").read_text() == (tmp_path / "chat.jinja").read_text()


def test_what_the_page_says_of_wrong_records_is_what_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (ROOT / "examples" / "chat.jinja").read_text()
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    records = [good] * 9
    records[6] = {"messages": [good["messages"][0], {"from": "gpt", "value": "b"}]}
    records[8] = {"messages": good["messages"][:1]}
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    sizes = {"sequence_length": 64, "micro_batch_size": 1, "micro_batches": 1, "seed": 0}
    with pytest.raises(DataError) as caught:
        load_data(train="chats.jsonl", tokenizer=tokenizer, cache_dir="cache", **sizes)
    assert f"```\n{caught.value}\n```" in PAGE


def test_settings_named_on_the_page_exist(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(re.search(r'^```yaml title="chat.yaml"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)[1])
    settings = load_config(path).model_dump()
    for section, key in re.findall(r"`(data|training|model)\.(\w+)[=`]", PAGE):
        assert key in settings[section], f"{section}.{key}"
    for target in re.findall(r"\]\(([^)#:]+)[)#]", PAGE):
        assert (ROOT / "docs" / target).exists(), target
