"""Bytes on SSDs: preallocated striped files, direct I/O, checksums, two-slot commits. Knows nothing of models."""

from greedysnake.storage.budget import FolderBudget, disk_budget, store_bytes
from greedysnake.storage.files import Transfer
from greedysnake.storage.memory import BLOCK_BYTES, aligned_empty, round_up
from greedysnake.storage.removal import remove_store
from greedysnake.storage.store import Store
from greedysnake.storage.system import System
from greedysnake.storage.verify import Damage

__all__ = [
    "BLOCK_BYTES",
    "Damage",
    "FolderBudget",
    "Store",
    "System",
    "Transfer",
    "aligned_empty",
    "disk_budget",
    "remove_store",
    "round_up",
    "store_bytes",
]
