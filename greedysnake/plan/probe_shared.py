"""How much computation, optimizer and disks slow each other down where they share the processor's cores."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from greedysnake.plan.hardware import SharedCores
from greedysnake.plan.probe_compute import CHUNK_ELEMENTS, LayerProbe, OptimizerWork, mean_passes
from greedysnake.plan.probe_disk import DiskProbe

_FILE_BYTES = 2**28
_ROUNDS = 3

Work = Callable[[Callable[[], bool]], None]
"""What a thread does until the function that it is given says that it is time to end."""


def shared_cores(
    layer: LayerProbe, optimizer: OptimizerWork, folder: Path, optimizer_rate: float, *, seconds: float
) -> SharedCores:
    """Measure a layer beside updates, then beside reads and writes, each in turns with the layer alone.

    Args:
        layer: to compute with.
        optimizer: work of the optimizer.
        folder: on a disk, to read from and write to.
        optimizer_rate: parameters per second with nothing beside it.
        seconds: for each of the two beside, and as much alone.

    Raises:
        StorageError: the folder cannot be used.
    """
    updated = moved = 0

    def update(stopped: Callable[[], bool]) -> None:
        nonlocal updated
        torch.set_num_threads(1)
        while not stopped():
            optimizer.update()
            updated += CHUNK_ELEMENTS

    compute, took = _speed_beside([update], layer, seconds)
    cpu = updated / took / optimizer_rate
    disk = DiskProbe(folder, _FILE_BYTES)

    def move(stopped: Callable[[], bool], *, write: bool) -> None:
        nonlocal moved
        moved += disk.move(write=write, until=stopped)[0]

    try:
        disk.fill()
        directions: list[Work] = [
            lambda stopped: move(stopped, write=False),
            lambda stopped: move(stopped, write=True),
        ]
        beside_disk, took = _speed_beside(directions, layer, seconds)
    finally:
        disk.close()
    return SharedCores(compute=compute, cpu=min(1.0, cpu), transfer=(1 - beside_disk) * took / moved)


def _speed_beside(works: Sequence[Work], layer: LayerProbe, seconds: float) -> tuple[float, float]:
    """Speed of a layer's computation beside other work, as a share of its speed alone; seconds of the other work."""
    alone = beside = took = 0.0
    for _ in range(_ROUNDS):  # in turns, as a machine's speed drifts
        alone += _layer_seconds(layer, seconds / _ROUNDS)
        start = time.perf_counter()
        with_others, failure = _beside(works, lambda: _layer_seconds(layer, seconds / _ROUNDS))
        took += time.perf_counter() - start
        if failure is not None:
            raise failure
        beside += with_others
    return min(1.0, alone / beside), took


def _layer_seconds(layer: LayerProbe, seconds: float) -> float:
    found = mean_passes(layer, seconds=seconds, kept=[False])
    return found["layer_forward"] + found["layer_backward"]


def _beside(works: Sequence[Work], body: Callable[[], float]) -> tuple[float, BaseException | None]:
    """What ``body`` gives while each of ``works`` runs in a thread of its own; what one of them failed with."""
    stop = threading.Event()
    failures: list[BaseException] = []
    torch_threads = torch.get_num_threads()

    def guarded(work: Work) -> None:
        try:
            work(stop.is_set)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        found = body()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        torch.set_num_threads(torch_threads)
    return found, next(iter(failures), None)
