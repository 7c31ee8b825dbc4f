"""Code in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_elsewhere(code: str, folder: Path, **options) -> subprocess.Popen:
    """Another process that runs ``code`` with the folder as its argument."""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options
    )
