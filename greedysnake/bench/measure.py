"""One cell: its process, in its box, and what came of it."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import greedysnake
from greedysnake.bench.cells import Cell, Method, Outcome, Setting, StepNumbers
from greedysnake.bench.install_peer import peer_environment
from greedysnake.bench.limits import Box, Limits, open_box, swap_free_bytes
from greedysnake.bench.models import bench_config, write_first_weights
from greedysnake.bench.runner import Job
from greedysnake.bench.systems import System
from greedysnake.errors import ConfigError, StorageError
from greedysnake.plan.hardware import Hardware, paced
from greedysnake.storage import System as SystemCalls
from greedysnake.storage.locks import FolderLock
from greedysnake.units import format_bytes

_WORK, _FIRST_WEIGHTS, _STORE, _PACKAGE = "greedysnake-bench", "first-weights", "store", "package"
_SPIN = "10000"
"""GOMP_SPINCOUNT, for every system: OpenMP threads that spin take cores that I/O and the optimizer need."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where cells are measured.

    Attributes:
        storage: folder on the disk that is measured with; all that is written there lies in one folder of its own.
        logs: folder for what the processes print.
        zero_infinity: virtual environment with DeepSpeed, or None.
        hardware: the machine's measured figures, for systems that plan with them; None: they go by a rule.
        seconds: after which a process is ended.
    """

    storage: Path
    logs: Path
    zero_infinity: Path | None = None
    hardware: Hardware | None = None
    seconds: float = 3600.0

    @property
    def work(self) -> Path:
        """The folder of its own: first weights stay in it, stores are removed after each cell."""
        return self.storage / _WORK

    @contextmanager
    def held(self) -> Iterator[None]:
        """While cells are measured: no other process does so in this folder.

        Raises:
            ConfigError: one does, or the folder cannot be written.
        """
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.work, writable=True, system=SystemCalls())
        except (OSError, StorageError) as error:
            raise ConfigError(f"--storage {self.storage}: cannot measure there: {error}") from error
        try:
            yield
        finally:
            lock.release()

    def first_weights(self, model: str, method: Method) -> Path:
        """Folder with the weights that a model starts from, made if it is missing (outside any limit)."""
        config = bench_config(model, method.tokens)
        folder = self.work / _FIRST_WEIGHTS / f"{Path(model).stem if os.sep in model else model}-{method.tokens}"
        write_first_weights(config, folder, method.seed)
        return folder


def measure_cell(
    cell: Cell, system: System, method: Method, place: Place, progress: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Run one cell and wait for its end.

    Args:
        cell: what to run; its ``system`` is the name of ``system``.
        system: how.
        method: what all cells share.
        place: where.
        progress: told each step.

    Raises:
        LimitsError: the limits cannot be set on this machine.
        GreedySnakeError: the model cannot be made.
    """
    if reason := impossible(system, place):
        return Outcome(status="skipped", why=reason)
    setting, store = cell.setting, place.work / _STORE
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    place.logs.mkdir(parents=True, exist_ok=True)
    job = Job(
        model=str(place.first_weights(setting.model, method).absolute()),
        storage=str(store.absolute()),
        micro_batches=setting.micro_batches,
        rows=method.rows,
        tokens=method.tokens,
        steps=method.steps,
        seed=method.seed,
        lr=method.lr,
        max_grad_norm=method.max_grad_norm,
        threads=method.threads,
        second_slot=method.second_slot,
        settings={**system.settings, **_figures(system, place, setting)},
    )
    job = replace(job, **system.changes)
    limits = Limits(memory=setting.memory, disk=setting.disk, swap=system.swap, folder=place.storage)
    log = place.logs / f"{_file_name(cell)}.log"
    os.sync()  # what was written before is not written back beside what is measured
    try:
        with open_box(limits, f"greedysnake-bench-{os.getpid()}") as box:
            command = [*box.prefix, str(_python(system, place)), "-m", system.module, "--json", json.dumps(asdict(job))]
            environment = _environment(system, method, place, box)
            outcome = _run(command, environment, box, place.seconds, log=log, progress=progress)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    update = {"code": code_digest()}
    if outcome.status == "out of memory":
        update["why"] = _memory_ran_out(setting.memory, outcome.peak_memory_bytes)
    return outcome.model_copy(update=update)


def code_digest() -> str:
    """Of this package's source."""
    package, found = Path(greedysnake.__file__).parent, blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return found.hexdigest()


def _memory_ran_out(limit: int | None, peak: int | None) -> str:
    if limit is None:
        return "the kernel killed it: the machine's memory ran out, and no --memory was given"
    reached = "" if peak is None else f", with {format_bytes(peak)} in use"
    return f"the kernel killed it at its limit of {format_bytes(limit)}{reached}; a larger --memory may do"


def _figures(system: System, place: Place, setting: Setting) -> dict[str, Any]:
    """The machine's figures within the limits, as JSON, for a system that plans with them."""
    if place.hardware is None or not system.plans:
        return {}
    return {"hardware": paced(place.hardware, setting.disk).model_dump(mode="json", exclude_none=True)}


def impossible(system: System, place: Place) -> str | None:
    """Why a system cannot be measured here, or None."""
    if system.swap and not swap_free_bytes():
        return "this machine has no swap (swapon)"
    if system.own_environment and place.zero_infinity is None:
        return "no --zero-infinity environment given; --install-zero-infinity VENV makes one"
    if system.own_environment and not _python(system, place).exists():
        return f"{_python(system, place)} does not exist; greedysnake bench --install-zero-infinity VENV makes it"
    return None


def _python(system: System, place: Place) -> Path:
    if system.own_environment and place.zero_infinity is not None:
        return place.zero_infinity / "bin" / "python"
    return Path(sys.executable)


def _environment(system: System, method: Method, place: Place, box: Box) -> dict[str, str]:
    """Of the process: as many threads for all, and this package alone where the environment is another."""
    found = {**os.environ, **box.environment, "OMP_NUM_THREADS": str(method.threads)}
    found |= {"GOMP_SPINCOUNT": _SPIN, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    package = Path(greedysnake.__file__).parent
    path = package.parent
    if system.own_environment and place.zero_infinity is not None:
        path = place.logs / _PACKAGE  # not the folder around the package, where other packages may lie
        path.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            (path / package.name).symlink_to(package)
        found |= peer_environment(place.zero_infinity, method.threads)
    found["PYTHONPATH"] = str(path.absolute())
    return found


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    box: Box,
    most_seconds: float,
    *,
    log: Path,
    progress: Callable[[str], None],
) -> Outcome:
    start = time.monotonic()
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            lines, on_time = _listen(process, start + most_seconds, progress)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # where it still runs
            process.wait()
    seconds, counts = time.monotonic() - start, box.counts()
    steps = tuple(StepNumbers(**_fields(line)) for line in lines if line["event"] == "step")
    last: Mapping[str, Any] = lines[-1] if lines else {}
    ready = next((line["at"] for line in lines if line["event"] == "ready"), None)
    known: dict[str, Any] = {
        "steps": steps,
        "seconds": seconds,
        "setup_seconds": None if ready is None else ready - start,
        "limited_by": box.kind,
        **asdict(counts),
    }
    if last.get("event") == "done":
        peak, details = last["process_peak_bytes"], last["details"]
        return Outcome(status="done", process_peak_bytes=peak, details=details, **known)
    if last.get("event") == "refused":
        return Outcome(status="refused", why=last["why"], **known)
    if not on_time:
        return Outcome(status="out of time", why=f"not done after {most_seconds:.0f} s", **known)
    killed = process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if counts.oom_kills or (killed and counts.oom_kills is None):
        return Outcome(status="out of memory", **known)
    tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
    return Outcome(status="failed", why=f"ended with {process.returncode}; see {log}: {tail[-600:]}", **known)


def _listen(
    process: subprocess.Popen[bytes], deadline: float, progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], bool]:
    """The lines of a runner till it ends, each with its time; and whether it ended before the deadline."""
    waiting: queue.Queue[bytes | None] = queue.Queue()
    assert process.stdout is not None
    out = process.stdout

    def read() -> None:
        for line in out:
            waiting.put(line)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    lines: list[dict[str, Any]] = []
    while True:
        try:
            line = waiting.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return lines, False
        if line is None:
            try:
                process.wait(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return lines, False
            return lines, True
        lines.append({**json.loads(line), "at": time.monotonic()})
        if lines[-1]["event"] == "step":
            done = sum(one["event"] == "step" for one in lines)
            progress(f"step {done}: {lines[-1]['seconds']:.1f} s, loss {lines[-1]['loss']:.4f}")


def _fields(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in StepNumbers.model_fields}


def _file_name(cell: Cell) -> str:
    setting = cell.setting
    words = f"{setting.model}-m{setting.micro_batches}-{setting.memory}-{setting.disk}-{cell.system}-{cell.run}"
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in words)
