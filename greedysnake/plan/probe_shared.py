"""How much computation, optimizer and disks slow each other down where they share the processor's cores."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from greedysnake.plan.hardware import SharedCores
from greedysnake.plan.probe_compute import CHUNK_ELEMENTS, LayerProbe, OptimizerWork, mean_passes
from greedysnake.plan.probe_disk import DiskProbe
from greedysnake.plan.probe_passes import EVERY, Passes

_FILE_BYTES = 2**28

Work = Callable[[Callable[[], bool]], int]
"""What a thread does until the function that it is given says that it is time to end; how much of it was done."""


def shared_cores(
    layer: LayerProbe,
    optimizer: OptimizerWork,
    folder: Path,
    optimizer_rate: float,
    *,
    seconds: float,
    passes: Passes = EVERY,
) -> SharedCores:
    """Measure a layer beside updates, then beside reads and writes, each in turns with the layer alone.

    Args:
        layer: to compute with.
        optimizer: work of the optimizer.
        folder: on a disk, to read from and write to.
        optimizer_rate: parameters per second with nothing beside it.
        seconds: for each of the two beside, and as much alone.
        passes: at least.

    Raises:
        StorageError: the folder cannot be used.
    """

    def update(stopped: Callable[[], bool]) -> int:
        torch.set_num_threads(1)
        updated = 0
        while not stopped() or not updated:
            optimizer.update()
            updated += CHUNK_ELEMENTS
        return updated

    compute, updated, took = speed_beside([update], layer, seconds, passes)
    cpu = updated / took / optimizer_rate
    disk = DiskProbe(folder, _FILE_BYTES)
    try:
        disk.fill()
        directions: list[Work] = [
            lambda stopped: disk.move(write=False, until=stopped)[0],
            lambda stopped: disk.move(write=True, until=stopped)[0],
        ]
        beside_disk, moved, took = speed_beside(directions, layer, seconds, passes)
    finally:
        disk.close()
    return SharedCores(compute=compute, cpu=min(1.0, cpu), transfer=(1 - beside_disk) * took / moved)


def speed_beside(
    works: Sequence[Work], layer: LayerProbe, seconds: float, passes: Passes = EVERY
) -> tuple[float, int, float]:
    """How a layer computes while other work goes on, in turns with the layer alone, as a machine's speed drifts.

    Args:
        works: what goes on, each in a thread of its own.
        layer: to compute with.
        seconds: of the layer beside it, and as much alone.
        passes: at least.

    Returns:
        The layer's speed as a share of its speed alone; what all of ``works`` did together, and in how many seconds.
    """
    alone = beside = took = 0.0
    done = 0
    each = seconds / passes.rounds
    for _ in range(passes.rounds):
        alone += _layer_seconds(layer, each, passes.micro_batches)
        start = time.perf_counter()
        with_others, more = _beside(works, lambda: _layer_seconds(layer, each, passes.micro_batches))
        took += time.perf_counter() - start
        beside += with_others
        done += more
    return min(1.0, alone / beside), done, took


def _layer_seconds(layer: LayerProbe, seconds: float, micro_batches: int) -> float:
    found = mean_passes(layer, seconds=seconds, kept=[False], micro_batches=micro_batches)
    return found["layer_forward"] + found["layer_backward"]


def _beside(works: Sequence[Work], body: Callable[[], float]) -> tuple[float, int]:
    """What ``body`` gives while each of ``works`` runs in a thread of its own, and how much these did together."""
    stop = threading.Event()
    torch_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(max_workers=len(works)) as threads:
            others = [threads.submit(work, stop.is_set) for work in works]
            try:
                found = body()
            finally:
                stop.set()
    finally:
        torch.set_num_threads(torch_threads)
    return found, sum(other.result() for other in others)
