"""A small bench from the command line, and what it wrote down."""

import json
from pathlib import Path


def command(folder: Path, *systems: str) -> list[str]:
    small = ["--model", "tiny", "--tokens", "16", "--micro-batches", "2", "--steps", "2", "--runs", "1"]
    named = [word for system in systems for word in ("--system", system)]
    return ["bench", "--storage", str(folder / "store"), "--out", str(folder / "bench.json"), *small, *named]


def read(folder: Path) -> dict:
    return json.loads((folder / "bench.json").read_text())
