"""Units in a store: which extents they take, how they get there, and how they are read back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from greedysnake.models.layout import Chunk, UnitLayout
from greedysnake.optim import read_master, write_master
from greedysnake.schedule import Schedule, Tier
from greedysnake.storage import BLOCK_BYTES, Store, Transfer, aligned_empty, round_up


def weights_key(unit: int, chunk: int) -> str:
    """The store's key of a chunk's weights."""
    return f"unit{unit}.weights{chunk}"


def state_key(unit: int, chunk: int) -> str:
    """The store's key of a chunk's state."""
    return f"unit{unit}.state{chunk}"


def frozen_key(unit: int, chunk: int) -> str:
    """The store's key of a chunk of weights that are not trained."""
    return f"unit{unit}.frozen{chunk}"


def gradient_key(unit: int, chunk: int) -> str:
    """The store's key of a gradient that waits for its update."""
    return f"unit{unit}.gradient{chunk}"


def boundary_key(slot: int) -> str:
    """The store's key of a place for boundaries."""
    return f"boundary{slot}"


def durable_extents(layouts: Sequence[UnitLayout]) -> dict[str, int]:
    """Bytes of every chunk's weights and of its state, by key."""
    extents = {}
    for unit, layout in enumerate(layouts):
        for index, chunk in enumerate(layout.chunks):
            extents[weights_key(unit, index)] = chunk.weight_bytes
            extents[state_key(unit, index)] = chunk.state_bytes
    return extents


def fixed_extents(layouts: Sequence[UnitLayout]) -> dict[str, int]:
    """Bytes of every chunk of weights that are not trained, by key."""
    return {
        frozen_key(unit, index): chunk.weight_bytes
        for unit, layout in enumerate(layouts)
        for index, chunk in enumerate(layout.frozen)
    }


def weight_places(unit: int, layout: UnitLayout) -> list[tuple[str, Chunk]]:
    """The store's keys of all of a unit's weights, and which part of them each holds."""
    trained = [(weights_key(unit, index), chunk) for index, chunk in enumerate(layout.chunks)]
    return [*trained, *((frozen_key(unit, index), chunk) for index, chunk in enumerate(layout.frozen))]


def scratch_extents(layouts: Sequence[UnitLayout], schedule: Schedule) -> dict[str, int]:
    """Bytes of what a schedule keeps on SSD within or between steps, by key."""
    extents = {}
    held = schedule.pools["held"]
    if held.tier == Tier.SSD:
        keys = [gradient_key(u, c) for u, layout in enumerate(layouts) for c in range(len(layout.chunks))]
        extents = {key: size for key, size in zip(keys, held.slot_bytes, strict=True) if size}
    for slot, size in enumerate(schedule.pools["ssd_boundary"].slot_bytes):
        if size:
            extents[boundary_key(slot)] = round_up(size, BLOCK_BYTES)
    return extents


def write_unit(store: Store, unit: int, layout: UnitLayout, master: Tensor) -> None:
    """Put a unit's first weights and state into the store.

    Args:
        store: to write to.
        unit: number of the unit.
        layout: its buffers.
        master: float32 [layout.elements], all weights, laid out as the gradient buffer with the frozen ones behind;
            used up.
    """
    weights = aligned_empty(max((chunk.weight_bytes for chunk in (*layout.chunks, *layout.frozen)), default=0))
    state = aligned_empty(max((chunk.state_bytes for chunk in layout.chunks), default=0))
    for index, chunk in enumerate(layout.frozen):
        own_weights = weights[: chunk.weight_bytes]
        own_weights.view(chunk.dtype).copy_(chunk.gradient(master))
        store.write(frozen_key(unit, index), [own_weights]).wait()
    for index, chunk in enumerate(layout.chunks):
        own_weights, own_state = weights[: chunk.weight_bytes], state[: chunk.state_bytes]
        write_master(chunk.gradient(master), own_weights.view(chunk.dtype), own_state[: chunk.master_bytes])
        own_state[chunk.master_bytes :].zero_()  # both moments
        weights_written = store.write(weights_key(unit, index), [own_weights])
        Transfer.together([weights_written, store.write(state_key(unit, index), [own_state])]).wait()


def read_unit_weights(store: Store, unit: int, layout: UnitLayout) -> dict[str, Tensor]:
    """A unit's weights by parameter name, as views of one buffer made for them."""
    buffer = aligned_empty(layout.weight_bytes)
    transfers = [store.read(key, chunk.weights(buffer)) for key, chunk in weight_places(unit, layout)]
    for transfer in transfers:
        transfer.wait()
    return {slot.name: slot.weight(buffer) for slot in layout.parameters}


def read_unit_masters(store: Store, unit: int, layout: UnitLayout) -> dict[str, Tensor]:
    """A unit's float32 master weights by parameter name, as views of one buffer made for them."""
    masters = torch.empty(layout.elements)
    weights = aligned_empty(max((chunk.weight_bytes for chunk in (*layout.chunks, *layout.frozen)), default=0))
    added = aligned_empty(max((chunk.master_bytes for chunk in layout.chunks), default=0))
    for index, chunk in enumerate(layout.frozen):  # these have no masters
        own_weights = weights[: chunk.weight_bytes]
        store.read(frozen_key(unit, index), own_weights).wait()
        chunk.gradient(masters).copy_(own_weights.view(chunk.dtype))
    for index, chunk in enumerate(layout.chunks):
        own_weights, own_added = weights[: chunk.weight_bytes], added[: chunk.master_bytes]
        transfers = [store.read(weights_key(unit, index), own_weights)]
        if chunk.master_bytes:
            transfers.append(store.read(state_key(unit, index), own_added))
        Transfer.together(transfers).wait()
        target = chunk.gradient(masters)
        found = read_master(own_weights.view(chunk.dtype), own_added, target)
        if found is not target:
            target.copy_(found)
    return {slot.name: slot.gradient(masters) for slot in layout.parameters}


def read_unit(store: Store, unit: int, layout: UnitLayout, *, masters: bool) -> dict[str, Tensor]:
    """A unit's weights, or its float32 masters, by parameter name."""
    return read_unit_masters(store, unit, layout) if masters else read_unit_weights(store, unit, layout)
