"""Fine-tuning a chat model through the command line alone: it learns, survives a kill, exports and generates."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chat_run import chats, write_chat_config
from chat_templates import MARKED
from small_run import run_well
from transformers import AutoModelForCausalLM, AutoTokenizer

from greedysnake.report.metrics import read_metrics

pytestmark = pytest.mark.slow


def start(*arguments: str | Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "greedysnake", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def numbers_of(run: Path) -> list[dict]:
    """Metrics without what depends on the clock and the machine."""
    timed = {"seconds", "tokens_per_second", "busy", "host_peak_bytes", "ssd_read_bytes", "ssd_write_bytes"}
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(run / "metrics.jsonl")]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_chat_model_is_fine_tuned_killed_resumed_exported_and_generates(tmp_path):
    config = write_chat_config(tmp_path)
    whole = start("train", config, f"run={tmp_path / 'whole'}")
    killed = start("train", config)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 45):
        assert killed.poll() is None, killed.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert "Going on after step" in finish(start("resume", tmp_path / "run"))
    assert "Done: 100 steps" in finish(whole)
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")

    exports = [start("export", tmp_path / run, tmp_path / f"{run}-model") for run in ("run", "whole")]
    for export in exports:
        finish(export)
    ours, theirs = files_of(tmp_path / "run-model"), files_of(tmp_path / "whole-model")
    assert ours == theirs
    assert any(name.endswith(".safetensors") for name in ours)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["last_eval_loss"] < 0.5 * summary["first_eval_loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run-model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run-model")
    question = chats(200, 1)[0][:1]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    answer = tokenizer.decode(written)
    assert answer.startswith("The answer is"), answer
    assert answer.endswith("<|im_end|>"), answer


def test_a_run_goes_on_without_the_file_of_its_chat_template(tmp_path, capsys):
    template = tmp_path / "template.jinja"
    template.write_text(MARKED)
    run_well(
        "train",
        write_chat_config(
            tmp_path,
            data={"chat_template": str(template)},
            training={"steps": 1, "eval_every": None},
            optimizer={"warmup_steps": 0},
        ),
    )
    template.unlink()
    run_well("resume", tmp_path / "run", "training.steps=2")
    assert "Done: 2 steps" in capsys.readouterr().out
