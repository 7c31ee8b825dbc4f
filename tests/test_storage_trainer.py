"""Training upon a store over several folders."""

from contextlib import closing

import pytest
import torch
from architectures import random_batches, small_config
from committed import weights_in

from greedysnake import AdamW, Trainer
from greedysnake.engine.opening import open_committed
from greedysnake.errors import ConfigError, StorageError


def trained(folders) -> dict[str, torch.Tensor]:
    """Weights at the last commit after two steps."""
    config = small_config("llama", num_hidden_layers=2, hidden_size=256, intermediate_size=512)
    with Trainer(config, folders, chunk_elements=4096 * 64, optimizer=AdamW(lr=1e-2), boundaries_on_ssd=1.0) as trainer:
        for batch in random_batches(2, 2, padding=False):
            trainer.step(batch)
    with closing(open_committed(folders)[0]) as store:
        assert store.verify() == []
    return weights_in(*folders)


def test_training_on_three_folders_gives_the_weights_of_training_on_one(tmp_path):
    folders = [tmp_path / f"disk{i}" for i in range(3)]
    expected, found = trained([tmp_path / "one"]), trained(folders)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    sizes = [(folder / "slot0.bin").stat().st_size for folder in folders]
    assert min(sizes[:2]) > 0
    with pytest.raises(StorageError, match="has 3 folders, and 1 given"):
        open_committed(folders[:1])


def test_a_folder_given_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="storage: give each folder once"):
        Trainer(small_config("llama"), [tmp_path, tmp_path])
