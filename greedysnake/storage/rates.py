"""How fast each folder's disk is, measured in a second or two, so that a faster one gets more stripes."""

import time

from greedysnake.storage.budget import free_bytes
from greedysnake.storage.files import Transfer
from greedysnake.storage.folders import HeldFolders
from greedysnake.storage.geometry import STRIPE_BYTES, Geometry, weighted, weights_for
from greedysnake.storage.memory import aligned_empty, as_bytes
from greedysnake.storage.names import RATE_NAME

TRIAL_BYTES = 16 * STRIPE_BYTES
_WORTH_IT_BYTES = 8 * TRIAL_BYTES


def measured_geometry(held: HeldFolders, total: int, stripe_bytes: int) -> Geometry:
    """A geometry for a store of ``total`` bytes by the folders' rates; equal shares where it makes little difference.

    Raises:
        StorageError: a folder cannot be written or read.
    """
    folders = range(len(held.paths))
    worth_it = len(folders) > 1 and total >= _WORTH_IT_BYTES
    if worth_it and all(free_bytes(path, held.system) > 2 * TRIAL_BYTES for path in held.paths):
        tried = [[folder_rate(held, folder) for folder in folders] for _ in range(2)]
        return weighted(
            weights_for([max(pair) for pair in zip(*tried, strict=True)]), stripe_bytes
        )  # others may use a disk too
    return weighted([1] * len(folders), stripe_bytes)


def folder_rate(held: HeldFolders, folder: int) -> float:
    """Bytes a second that a folder's disk writes and reads with the store's own threads and sizes.

    Raises:
        StorageError: the folder cannot be written or read.
    """
    file = held.block_file(folder, RATE_NAME, TRIAL_BYTES, create=True, writable=True)
    try:
        memory = as_bytes(aligned_empty(TRIAL_BYTES))
        memory[:] = bytes(range(256)) * (TRIAL_BYTES // 256)  # not zeroes, which some disks leave out
        pieces = range(0, TRIAL_BYTES, STRIPE_BYTES)
        start = 0.0
        for attempt in range(2):  # the first also takes the file system's time for new space, which does not come again
            if attempt:
                start = time.perf_counter()
            Transfer([file.write([memory[at : at + STRIPE_BYTES]], at) for at in pieces]).wait()
            file.sync()
        Transfer([file.read([memory[at : at + STRIPE_BYTES]], at) for at in pieces]).wait()
        return 2 * TRIAL_BYTES / (time.perf_counter() - start)
    finally:
        file.close()
        held.remove(RATE_NAME)
