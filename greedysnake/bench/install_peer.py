"""Makes the virtual environment that ZeRO-Infinity runs in, with its extensions compiled."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from greedysnake.errors import GreedySnakeError

DEEPSPEED = "0.19.8"
EXTENSIONS = "extensions"
_COMPILE = """
from deepspeed.accelerator import get_accelerator
for name in ("PinMemoryBuilder", "AsyncIOBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load()
"""
"""All that a run would compile otherwise, within its limits."""


def peer_environment(folder: Path, threads: int) -> dict[str, str]:
    """Variables that ZeRO-Infinity's processes need."""
    return {
        "DS_ACCELERATOR": "cpu",
        "MAX_JOBS": str(threads),
        "TORCH_EXTENSIONS_DIR": str((folder / EXTENSIONS).absolute()),
        "PATH": f"{(folder / 'bin').absolute()}:{os.environ['PATH']}",  # ninja
    }


def install_zero_infinity(folder: Path, say: Callable[[str], None]) -> None:
    """Make the environment: this one's torch and transformers, DeepSpeed, and what it compiles.

    Called again, it goes on: what is installed and compiled stays.

    Raises:
        GreedySnakeError: something is missing, or a command failed.
    """
    missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    if not any(Path(path, "libaio.h").exists() for path in ("/usr/include", "/usr/local/include")):
        missing.append("libaio.h")
    if missing:
        raise GreedySnakeError(
            f"ZeRO-Infinity compiles its asynchronous I/O; missing {', '.join(missing)}. On Debian or Ubuntu: "
            f"apt-get install build-essential libaio-dev python3-dev"
        )
    python = folder / "bin" / "python"
    torch, transformers = version("torch").split("+")[0], version("transformers")
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    steps = {
        f"a virtual environment in {folder}": [sys.executable, "-m", "venv", str(folder)],
        f"torch {torch}, as here": [*pip, f"torch=={torch}"],
        f"DeepSpeed {DEEPSPEED}": [
            *pip,
            f"torch=={torch}",
            f"transformers=={transformers}",
            f"deepspeed=={DEEPSPEED}",
            "ninja",
            "setuptools",
        ],
        "its extensions, compiled; some minutes": [str(python), "-c", _COMPILE],
    }
    for lock in (folder / EXTENSIONS).glob("*/lock"):  # of a compilation that was killed: the next waits for ever
        lock.unlink()
    for what, command in steps.items():
        say(what)
        environment = {**os.environ, **peer_environment(folder, os.cpu_count() or 1)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise GreedySnakeError(f"{what}: {' '.join(command[:4])} ... ended with {done.returncode}:\n{tail}")
