"""A run that takes a second, from the command line."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from greedysnake.cli.app import main

TEXT = "the quick brown fox jumps over the lazy dog. " * 60


def write_config(folder: Path, **sections) -> Path:
    """A run that takes a second: two layers on a few hundred bytes."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(4)))
    settings = {
        "run": str(folder / "run"),
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": 258,
                "max_position_embeddings": 64,
            }
        },
        "data": {"train": str(text), "sequence_length": 32, "eval_share": 0.1},
        "training": {"steps": 4, "micro_batches": 2, "micro_batch_size": 2, "eval_every": 2},
        "optimizer": {"lr": 1e-2},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values} if isinstance(values, dict) else values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run_well(*arguments: str | Path) -> None:
    """A command, run in this process; it must end well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["greedysnake", *map(str, arguments)])
        with pytest.raises(SystemExit, match=r"^0$"):
            main()


def copy_of_records(run: Path, folder: Path) -> Path:
    """What a run has written down beside its store, in a new folder."""
    folder.mkdir()
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "summary.json", "trace.json"):
        shutil.copy(run / name, folder)
    return folder
