"""Each failure that the documentation explains is made to happen, and says what its page quotes."""

import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from pages import DOCS, ROOT, not_printed, quoted, unmeasured
from small_run import write_config
from test_cli import command  # noqa: F401
from test_fault_commands import fill, small_disk  # noqa: F401

from greedysnake.report import sections_time
from greedysnake.report.page import write_report
from greedysnake.storage import Store, System, files

FOLDER = Path("troubleshooting")


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A small run with the names of the pages."""
    monkeypatch.chdir(tmp_path)
    path = write_config(tmp_path, run="runs/chat", training={"eval_every": None}, model={"dtype": "float32"})
    return path.rename("chat.yaml")


@pytest.fixture
def says(command) -> Callable[..., str]:  # noqa: F811
    """All that a command prints."""
    return lambda *arguments: "".join(command(*arguments)[1:])


def beside(config: Path, *overrides: str, before: Callable[[], None] | None = None) -> Command:
    """A run in a process of its own that ends only by what is done to it."""
    steps = ["training.steps=1000000", "optimizer.lr_schedule=constant"]
    return Command(["train", config, *steps, *overrides], Path("log"), before)


def test_out_of_memory(config, says):
    printed = says("train", config, "engine.host_memory=20MiB")
    assert not Path("runs").exists()
    run = beside(config, "engine.host_memory=2GiB")
    run.wait_for_steps(Path("runs/chat"), 2)
    os.kill(run.process.pid, signal.SIGKILL)  # as the kernel does
    status, output = run.ending()
    assert status == -signal.SIGKILL
    assert "error" not in output
    assert "Saved" not in output
    page, _ = write_report(Path("runs/chat"))
    missing = not_printed(FOLDER / "out-of-memory.md", printed + output + page.read_text())
    # what is left are the shell's words and the kernel's
    assert [line.split()[-1] for line in missing if "Killed" in line] == ["engine.host_memory=2GiB", "oom_score_adj:0"]
    assert [line for line in missing if "Killed" not in line and "most of it" not in line] == []
    assert "(most of it: process" in printed
    steps = Path("runs/chat/metrics.jsonl").read_text().count("\n")
    assert "Going on after step" in says(
        "resume", "runs/chat", "engine.host_memory=1900MiB", f"training.steps={steps + 1}"
    )


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_disk_full(config, says, small_disk):  # noqa: F811
    storage = "engine.storage=[disk/store]"
    filling = fill(small_disk)
    printed = says("train", config, storage)
    filling.unlink()
    assert not Path("runs").exists()
    printed += beside(config, before=limit_file_size).ending()[1]
    run = beside(config, storage)
    run.wait_for_steps(Path("runs/chat"), 3)
    filling = fill(small_disk)
    printed += run.ending()[1]
    filling.unlink()
    shutil.rmtree(small_disk / "store")
    Path("small").symlink_to(small_disk)
    run = beside(config, "run=small/runs/chat", "engine.storage=[elsewhere]")
    run.wait_for_steps(Path("small/runs/chat"), 3)
    fill(small_disk)
    printed += run.ending()[1].replace("small/runs", "runs")
    assert not_printed(FOLDER / "disk-full.md", printed) == []


def test_not_finite(config, says):
    given = ["optimizer.lr=1e12", "optimizer.max_grad_norm=null", "training.max_skipped_steps=3"]
    printed = says("train", config, "run=runs/nan", "training.steps=20", *given)
    assert not_printed(FOLDER / "not-finite.md", printed) == []


def test_slower_than_planned(config, says):
    assert "Done" in says("train", config)
    page, _ = write_report(Path("runs/chat"))
    text = unmeasured(page.read_text().replace("<b>", "").replace("</b>", ""))
    # Which of the sentences a run gets depends on the machine: their parts are looked for where they are made.
    source = "".join(Path(module.__file__).read_text() for module in (sections_time, files))
    for line in quoted(FOLDER / "slower-than-planned.md"):
        for part in ("limits this run", "is busy", "would take", "The others:", "wait for each other", "The longest"):
            assert part not in line or part in text or part in source, part
    assert "limits this run by itself; they wait for each other." in source
    assert "the filesystem refuses direct I/O, so buffered I/O is used: slower" in source
    assert "limits this run" in text
    assert "Rates reached" in text
    assert "The plan, and why" in text


def die_while_writing() -> None:
    """Have the process killed in the middle of a step."""
    calls, real = itertools.count(), System.pwritev

    def write(self: System, *given: Any) -> int:
        if next(calls) == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *given)

    System.pwritev = write


def test_resume_refuses(config, says):
    text = Path("text.jsonl")
    store = Path("runs/chat/store")
    assert "Done" in says("train", config, "training.steps=2")
    printed = says("resume", "runs/chat", "training.steps=2")
    printed += says("resume", "runs/nothing")
    printed += says("resume", "runs/chat", "model.dtype=bfloat16", "training.micro_batches=4", "run=elsewhere")
    before = text.read_text()
    text.write_text(before.replace("fox", "cat"))
    printed += says("resume", "runs/chat", "training.steps=8")
    text.write_text(before)
    held, _ = Store.open([store])
    for verb in (["resume", "runs/chat", "training.steps=8"], ["verify", "runs/chat"]):
        printed += (said := says(*verb))
        assert f"{store} is in use by process {os.getpid()}." in said
    held.close()
    shutil.copytree("runs/chat", "runs/bad")
    for path in Path("runs/bad/store").glob("slot?.bin"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    printed += says("resume", "runs/bad", "training.steps=8")
    manifest = Path("runs/bad/store/manifest.json")
    manifest.write_text(manifest.read_text().replace("run", "ruin", 1))
    printed += says("resume", "runs/bad", "training.steps=8")
    manifest.unlink()
    printed += says("resume", "runs/bad", "training.steps=8")
    shutil.rmtree("runs/chat")
    assert beside(config, "engine.second_slot=false", before=die_while_writing).ending()[0] == -signal.SIGKILL
    printed += says("resume", "runs/chat")
    (damaged,) = not_printed(FOLDER / "resume-refuses.md", printed) or [""]
    # Which piece is damaged depends on the model's sizes.
    assert damaged.partition(", bytes")[0].strip() in {"", "runs/bad/store/slot1.bin"}
    assert ", part of unit" in printed
    assert "when it was written" in printed


def test_the_overview_names_words_that_the_pages_quote():
    rows = [line for line in (DOCS / FOLDER / "index.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) >= 4
    for row in rows:
        seen, read = row.strip("|").split(" | ")
        page = (DOCS / FOLDER / read.partition("](")[2].partition(")")[0]).read_text()
        for words in seen.split("`")[1::2]:
            for part in words.split(" ... "):
                assert part in page or any(part in path.read_text() for path in ROOT.glob("greedysnake/**/*.py")), part
