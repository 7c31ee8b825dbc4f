"""What storage folders move: reads, writes, and both together, through the run's own store."""

import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from greedysnake.errors import StorageError
from greedysnake.plan.hardware import Disk
from greedysnake.storage import Store, aligned_empty
from greedysnake.storage.budget import disk_budget
from greedysnake.units import format_bytes

FOLDER_NAME = "greedysnake-probe"
_PIECE_BYTES = 32 * 2**20
_LEAST_BYTES = 4 * _PIECE_BYTES
_MARGIN = 0.95
"""Of what is free, the share that a run is planned to take."""


class DiskProbe:
    """One folder to measure: a store with one file of ``size`` bytes.

    Args:
        folder: to measure; the store goes into a new folder inside it.
        size: bytes that the store takes.

    Raises:
        StorageError: the folder cannot be used or has too little room.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self._inner = folder / f"{FOLDER_NAME}-{uuid.uuid4().hex[:8]}"
        self._pieces = size // _PIECE_BYTES
        keys = {f"piece{i}": _PIECE_BYTES for i in range(self._pieces)}
        # durable, so that what is written gets its checksum, as a run's weights and state do
        self._store = Store.create([self._inner], run=uuid.uuid4().hex, durable=keys, scratch={}, slots=1)
        self._source, self._target = aligned_empty(_PIECE_BYTES), aligned_empty(_PIECE_BYTES)
        # what cannot be compressed: some disks and virtual machines are faster with zeros
        self._source.copy_(torch.randint(0, 256, (_PIECE_BYTES,), dtype=torch.uint8))

    def close(self) -> None:
        """Give the disk back."""
        self._store.close()
        shutil.rmtree(self._inner, ignore_errors=True)

    def fill(self) -> None:
        """Write everything once, so that reads find something."""
        for i in range(self._pieces):
            self._store.write(f"piece{i}", [self._source]).wait()

    def move(self, *, write: bool, until: Callable[[], bool]) -> tuple[int, float]:
        """Read or write pieces one after the other, two at a time, until told to stop; bytes and seconds."""
        start, moved, pending, i = time.perf_counter(), 0, [], 0
        while not until() or not moved:
            key = f"piece{i % self._pieces}"
            transfer = self._store.write(key, [self._source]) if write else self._store.read(key, self._target)
            pending.append(transfer)
            if len(pending) == 2:
                pending.pop(0).wait()
                moved += _PIECE_BYTES
            i += 1
        for transfer in pending:
            transfer.wait()
            moved += _PIECE_BYTES
        return moved, time.perf_counter() - start


def measure_disks(
    folders: Sequence[Path], *, seconds: float = 4.0, size: int = 2**30
) -> tuple[list[Disk], Disk | None]:
    """Rates of each folder and, if there are several, of all of them together.

    Args:
        folders: that a run would use.
        seconds: for each rate.
        size: bytes of the file that is read and written; less where less is free.

    Raises:
        StorageError: a folder cannot be used.
    """
    with ExitStack() as stack:
        probes = []
        shares = free_shares(folders)  # before there are files of the probe
        for folder, free in zip(folders, shares, strict=True):
            fitting = min(size, free // 2 // _PIECE_BYTES * _PIECE_BYTES)
            if fitting < _LEAST_BYTES:
                raise StorageError(
                    f"{folder}: {format_bytes(free)} are free, and a probe needs {format_bytes(2 * _LEAST_BYTES)}; "
                    f"free some space, or probe another folder"
                )
            probe = DiskProbe(folder, fitting)
            stack.callback(probe.close)
            probe.fill()
            probes.append(probe)
        disks = [
            _measure([probe], seconds, str(probe.folder), free) for probe, free in zip(probes, shares, strict=True)
        ]
        together = _measure(probes, seconds, "together", sum(shares)) if len(probes) > 1 else None
    return disks, together


def free_shares(folders: Sequence[Path]) -> list[int]:
    """Bytes free for each folder, which is made if need be; folders on one file system have equal parts of it.

    Raises:
        StorageError: a folder cannot be used.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be used: {error.strerror}") from error
    found = disk_budget(folders, {}, {})
    sharing = Counter(one.device for one in found)
    return [one.free // sharing[one.device] for one in found]


def _measure(probes: Sequence[DiskProbe], seconds: float, name: str, free: int) -> Disk:
    read = _rates(probes, [False], seconds)[0]
    write = _rates(probes, [True], seconds)[0]
    mixed_read, mixed_write = _rates(probes, [False, True], seconds)
    return Disk(
        name=name,
        read=read,
        write=write,
        # a disk whose cache makes a rate look higher in mixed traffic is not counted on to do so
        mixed_read=min(mixed_read, read),
        mixed_write=min(mixed_write, write),
        capacity=int(free * _MARGIN),
    )


def _rates(probes: Sequence[DiskProbe], directions: Sequence[bool], seconds: float) -> list[float]:
    """Bytes per second of all probes in each direction, all at once."""
    deadline = time.perf_counter() + seconds
    moved = dict.fromkeys(directions, 0.0)
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work(probe: DiskProbe, write: bool) -> None:
        try:
            count, took = probe.move(write=write, until=lambda: time.perf_counter() >= deadline)
            with lock:
                moved[write] += count / took
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(probe, write)) for probe in probes for write in directions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [moved[write] for write in directions]
