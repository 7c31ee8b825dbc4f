"""Small stores for tests, and what is in them."""

from pathlib import Path

import torch

from greedysnake.storage import BLOCK_BYTES, Store, aligned_empty

SLOTS = ("slot0.bin", "slot1.bin")


def content(size: int, seed: int) -> torch.Tensor:
    """Random bytes."""
    tensor = aligned_empty(size)
    tensor.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor


def read(store: Store, key: str, size: int, offset: int = 0) -> bytes:
    """Bytes of an extent."""
    into = aligned_empty(size)
    into.fill_(0xA5)
    store.read(key, into, offset).wait()
    return bytes(into.numpy())


def small_store(folder: Path, **options) -> Store:
    """A new store of a few blocks."""
    extents = {"durable": {"a": BLOCK_BYTES, "b": 3 * BLOCK_BYTES}, "scratch": {"s": 2 * BLOCK_BYTES}}
    return Store.create([folder], run="run", **(extents | options))


def committed_store(folder: Path, contents: dict | None = None, **options) -> tuple[bytes, bytes]:
    """A closed store with one commit; what its two extents hold."""
    store = small_store(folder, **options)
    values = content(BLOCK_BYTES, 1), content(3 * BLOCK_BYTES, 2)
    for key, value in zip("ab", values, strict=True):
        store.write(key, [value]).wait()
    store.commit(contents or {})
    store.close()
    return bytes(values[0].numpy()), bytes(values[1].numpy())
