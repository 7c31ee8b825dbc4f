"""Every command and every line of Python in the README works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHORT = {
    "train": ["training.steps=2", "optimizer.warmup_steps=1", "training.eval_every=2"],
    "resume": ["training.steps=3"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_greedysnake_commands_run_in_the_order_of_the_readme(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    ran = 0
    for command in commands():
        words = command.split()
        if words[0] != "greedysnake":
            continue
        result = subprocess.run(
            [sys.executable, "-m", *words, *SHORT.get(words[1], [])], cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, command + result.stdout + result.stderr
        ran += 1
    assert ran >= 2


@pytest.mark.parametrize("command", [line for line in commands() if line.split()[0] != "greedysnake"])
def test_other_commands_are_targets_and_scripts_of_this_repository(command):
    words = [word for word in command.split() if not word.startswith("-") and "=" not in word]
    if words[0] == "make":
        done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        script = next(word for word in words if word.startswith("scripts/"))
        assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0


def test_the_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)

    def my_micro_batches(step: int) -> list[dict[str, torch.Tensor]]:
        ids = torch.randint(0, 258, (2, 16), generator=generator)
        return [{"input_ids": part, "labels": part} for part in ids.split(1)]

    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {"my_micro_batches": my_micro_batches})
    assert (tmp_path / "trained-model" / "config.json").is_file()


def test_links_and_the_tree_name_files_that_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    tree = re.search(r"^greedysnake/\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    folder = None
    for line in tree[1].splitlines():
        room = re.match(r"  (\w+)/", line)
        folder = room[1] if room else folder
        for name in re.findall(r"\b\w+\.py\b", line):
            assert (ROOT / "greedysnake" / folder / name).is_file(), f"{folder}/{name}"
