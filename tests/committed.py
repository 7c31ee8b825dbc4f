"""What a crash would leave of a run."""

from pathlib import Path

from torch import Tensor

from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import read_unit_weights


def weights_in(*folders: Path) -> dict[str, Tensor]:
    """Weights at a store's last commit, read as an export after a crash would."""
    store, skeleton, _ = open_committed(folders)
    try:
        return {
            name: tensor.clone()
            for unit, layout in enumerate(skeleton.layouts)
            for name, tensor in read_unit_weights(store, unit, layout).items()
        }
    finally:
        store.close()
