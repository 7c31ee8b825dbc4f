"""Every file and command of the tutorial works, in the order in which a reader meets them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks, not_printed

from greedysnake.cli.app import main

INSTALL, *REST = blocks("tutorial.md")


def test_installation(tmp_path):
    """Everything but the packages that it needs, which the tests have already."""
    assert INSTALL.commands == ["python3 -m venv venv", ". venv/bin/activate", "pip install ."]
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "greedysnake", tmp_path / "greedysnake", ignore=shutil.ignore_patterns("__pycache__"))
    python = [sys.executable, "-m"]
    run([*python, "venv", "--without-pip", "venv"], tmp_path)
    offline = ["--ignore-installed", "--no-deps", "--no-build-isolation", "--no-index", "--prefix", "venv"]
    run([*python, "pip", "install", "--quiet", *offline, "."], tmp_path)
    program = tmp_path / "venv" / "bin" / "greedysnake"
    assert os.access(program, os.X_OK)
    profiles = tmp_path.glob("venv/lib/python*/site-packages/greedysnake/plan/profiles/laptop-cpu-24gb.yaml")
    assert len(list(profiles)) == 1


def test_from_a_model_made_on_the_spot_to_one_that_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed, ran = "", []
    for block in REST:
        if block.title:
            Path(block.title).write_text(block.body)
        elif block.language == "bash":
            for command in block.commands:
                printed += greedysnake(command, monkeypatch, capsys) or run(["bash", "-c", command], tmp_path)
                ran.append(command.split()[1])
    for verb in ("train", "export", "preview", "plan", "report", "resume", "verify", "clean"):
        assert verb in ran
    assert "ask.py" in ran
    assert not_printed("tutorial.md", printed) == []
    assert (tmp_path / "runs" / "chat" / "report.html").is_file()
    assert not (tmp_path / "runs" / "chat" / "store").exists()


def greedysnake(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """What a command prints that is run in this process, where torch is loaded already; "" if it is another's."""
    words = command.split()
    if words[0] != "greedysnake":
        return ""
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    output = "".join(capsys.readouterr())
    assert not ended.value.code, command + output
    return output


def run(command: list[str], folder: Path) -> str:
    """What a program prints, which must end well; python3 is the one that runs the tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
