"""Bytes on SSDs: preallocated files, direct I/O, two-slot commits. Knows nothing of models."""

from greedysnake.storage.files import Transfer
from greedysnake.storage.memory import BLOCK_BYTES, aligned_empty, round_up
from greedysnake.storage.store import Store, store_bytes

__all__ = ["BLOCK_BYTES", "Store", "Transfer", "aligned_empty", "round_up", "store_bytes"]
