"""How near the store comes to the disk: its rates beside those of fio, on the same files, in turns.

    python scripts/disk_rate.py FOLDER [FOLDER ...] [--gib 2] [--rounds 5] [--fio-memory shmhuge]

The folders get a store with two slots of GIB/2 gibibytes, which is removed at the end. Both sides use direct I/O in
blocks of 8 MiB, four under way at a time (the store has more threads for writing, as each computes a checksum first),
end writing with a flush, and take turns, so that what else the disk does meets both. Without fio, only its own rates
are shown.

The store's memory is in huge pages, which makes direct I/O a good deal faster on some disks. fio's is in ordinary pages
unless it is told otherwise: reserve some (sysctl vm.nr_hugepages=64) and give --fio-memory shmhuge.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from greedysnake.storage import Store, Transfer, aligned_empty, remove_store
from greedysnake.storage.folders import READ_THREADS
from greedysnake.storage.geometry import STRIPE_BYTES

EXTENT_BYTES = 5 * STRIPE_BYTES
UNDER_WAY = 4
"""Extents that are moved at once, so that no thread waits for the next."""

MODES = ("read", "write", "both")


class StoreSide:
    """Moves all extents of a store, as training does.

    Args:
        store: to move; both slots have been written.
        keys: its extents.
    """

    def __init__(self, store: Store, keys: list[str]) -> None:
        self._store = store
        self._keys = keys
        generator = torch.Generator().manual_seed(0)
        self._memory = [aligned_empty(EXTENT_BYTES) for _ in range(2 * UNDER_WAY)]
        for memory in self._memory:
            memory.copy_(torch.randint(0, 256, (EXTENT_BYTES,), dtype=torch.uint8, generator=generator))

    def rate(self, mode: str) -> float:
        """Bytes a second."""
        reads, writes = mode in ("read", "both"), mode in ("write", "both")
        moved = len(self._keys) * EXTENT_BYTES * (reads + writes)
        under_way: list[list[Transfer]] = []
        start = time.perf_counter()
        for number, key in enumerate(self._keys):
            if len(under_way) == UNDER_WAY:
                Transfer.together(under_way.pop(0)).wait()
            read, write = self._memory[number % UNDER_WAY], self._memory[UNDER_WAY + number % UNDER_WAY]
            begun = [self._store.read(key, read)] if reads else []
            under_way.append([*begun, *([self._store.write(key, [write])] if writes else [])])
        for transfers in under_way:
            Transfer.together(transfers).wait()
        if writes:
            self._store.commit({})
        return moved / (time.perf_counter() - start)


def fio_rate(folders: list[Path], mode: str, *, engine: str, memory: str) -> float:
    """Bytes a second of fio on the store's files.

    Args:
        folders: where they are.
        mode: one of MODES.
        engine: ``"psync"``: a thread for each part of a file; ``"libaio"``: one queue for each file, as deep.
        memory: what fio calls iomem.
    """
    threads, depth = (READ_THREADS, 1) if engine == "psync" else (1, READ_THREADS)
    command = ["fio", "--output-format=json", "--thread", "--direct=1", f"--ioengine={engine}", f"--iodepth={depth}"]
    command += [
        f"--bs={STRIPE_BYTES}",
        f"--numjobs={threads}",
        "--end_fsync=1",
        "--fallocate=none",
        f"--iomem={memory}",
    ]
    for direction, name in (("read", "slot0.bin"), ("write", "slot1.bin")):
        for number, folder in enumerate(folders if mode in (direction, "both") else []):
            share = (folder / name).stat().st_size // threads // STRIPE_BYTES * STRIPE_BYTES
            command += [f"--name={direction}{number}", f"--filename={folder / name}", f"--rw={direction}"]
            command += [f"--size={share}", f"--offset_increment={share}"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    parts = [job[direction] for job in told["jobs"] for direction in ("read", "write")]
    return sum(part["io_bytes"] for part in parts) / max(part["runtime"] for part in parts) * 1000


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders on the disks to measure")
    parser.add_argument("--gib", type=float, default=2.0, help="disk to use")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fio-memory", default="malloc", help="fio's iomem: malloc, shmhuge, ...")
    options = parser.parse_args()
    folders = [folder / f"disk-rate-{uuid.uuid4().hex}" for folder in options.folders]
    keys = [f"extent{i}" for i in range(max(1, int(options.gib * 2**30 / 2) // EXTENT_BYTES))]
    store = Store.create(folders, run="disk-rate", durable=dict.fromkeys(keys, EXTENT_BYTES), scratch={})
    try:
        side = StoreSide(store, keys)
        sides: dict[str, Callable[[str], float]] = {"store": side.rate}
        if shutil.which("fio"):
            for engine in ("psync", "libaio"):
                sides[f"fio {engine}"] = partial(fio_rate, folders, engine=engine, memory=options.fio_memory)
        for _ in range(2):  # both slots: the first write of a block costs the file system more than any later one
            side.rate("write")
        found: dict[tuple[str, str], list[float]] = {}
        for number in range(options.rounds):
            for mode in MODES:
                for name in sorted(sides, reverse=number % 2 == 0):
                    found.setdefault((name, mode), []).append(sides[name](mode))
        print_table(list(sides), found)
    finally:
        store.close()
        remove_store(folders)


def print_table(sides: list[str], found: dict[tuple[str, str], list[float]]) -> None:
    """Median rates in GB/s, their range, and how the store's compare."""
    print(f"{'':6}" + "".join(f"{name + ', GB/s':>22}" for name in sides) + f"{'store / best fio':>18}")
    for mode in MODES:
        line = f"{mode:6}"
        for name in sides:
            rates = [rate / 1e9 for rate in found[name, mode]]
            line += f"{statistics.median(rates):8.2f} ({min(rates):.2f}-{max(rates):.2f})".rjust(22)
        store, *others = (statistics.median(found[name, mode]) for name in sides)
        if others:
            line += f"{store / max(others):18.1%}"
        print(line)


if __name__ == "__main__":
    main()
