"""A step leaves nothing behind: the long check of scripts/soak.py, shortened."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "soak.py"


def test_two_hundred_steps_leave_nothing_behind(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--steps", "200", tmp_path / "store"],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines[1:-1]] == list(range(20, 201, 20))
    assert lines[-1] == "nothing grew"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


def test_what_grew_is_named(script):
    first = script.Usage(step=20, memory_bytes=1000, threads=9, files=12, milliseconds=1.0)
    assert script.growth([first, replace(first, step=200, memory_bytes=1050)]) == []
    assert script.growth([first, replace(first, step=200, memory_bytes=900, threads=8, files=11)]) == []
    assert script.growth([first, replace(first, step=200, memory_bytes=1060, threads=10, files=13)]) == [
        "resident memory grew by 6.0% between step 20 and step 200",
        "threads grew from 9 to 10 between step 20 and step 200",
        "files grew from 12 to 13 between step 20 and step 200",
    ]
