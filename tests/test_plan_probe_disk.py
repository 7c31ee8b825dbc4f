"""What the probe says of storage folders: figures that add up, not how fast the disks are."""

import shutil

import pytest

from greedysnake.errors import StorageError
from greedysnake.plan import probe_disk
from greedysnake.plan.probe_disk import free_shares, measure_disks
from greedysnake.storage.budget import disk_budget


def test_folders_on_one_file_system_divide_what_is_free_there(tmp_path):
    folders = [tmp_path / name for name in ("a", "b/c", "d")]
    shares = free_shares(folders)
    # a third each; everything each would be three times what is free
    assert 0.5 * shutil.disk_usage(tmp_path).free < sum(shares) < 1.5 * shutil.disk_usage(tmp_path).free


def test_what_is_free_is_taken_before_the_probe_has_files(tmp_path, monkeypatch):
    folders, seen = [tmp_path / "a", tmp_path / "b"], []

    def watched(places, *extents):
        seen.append([list(place.iterdir()) for place in places])
        return disk_budget(places, *extents)

    monkeypatch.setattr(probe_disk, "disk_budget", watched)
    disks, together = measure_disks(folders, seconds=0.01, size=2**27)
    assert seen == [[[], []]]
    assert together is not None
    assert together.capacity == pytest.approx(sum(disk.capacity for disk in disks), rel=1e-9)
    assert sum(disk.capacity for disk in disks) < 1.5 * shutil.disk_usage(tmp_path).free
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        free_shares([tmp_path / "file" / "inner"])
