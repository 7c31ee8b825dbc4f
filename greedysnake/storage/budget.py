"""How much disk a store takes in each of its folders, and whether it is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from greedysnake.errors import StorageError
from greedysnake.storage.geometry import Geometry, weighted
from greedysnake.storage.system import System, reason, uninterrupted
from greedysnake.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class FolderBudget:
    """Disk of one folder.

    Attributes:
        folder: the folder; it may not exist yet.
        device: number of the file system that it is on.
        needed: bytes that the store takes there.
        free: bytes free on its file system now.
        left: bytes free there once the whole store is in place, also in other folders on it; negative: so many lack.
    """

    folder: Path
    device: int
    needed: int
    free: int
    left: int


def store_bytes(
    durable: Mapping[str, int], scratch: Mapping[str, int], *, slots: int = 2, fixed: Mapping[str, int] | None = None
) -> int:
    """Bytes of disk that a store with these extents takes, in all folders together."""
    return slots * sum(durable.values()) + sum((fixed or {}).values()) + sum(scratch.values())


def disk_budget(
    folders: Sequence[Path],
    durable: Mapping[str, int],
    scratch: Mapping[str, int],
    *,
    slots: int = 2,
    fixed: Mapping[str, int] | None = None,
    geometry: Geometry | None = None,
    system: System | None = None,
) -> list[FolderBudget]:
    """What a store with these extents takes in each folder, and what is there.

    Args:
        folders: where it would be.
        durable, scratch: bytes by key.
        slots: of each durable extent.
        fixed: bytes by key of what is written once.
        geometry: which share each folder gets; None: equal shares.
        system: the system calls.

    Raises:
        StorageError: it cannot be found out how much is free.
    """
    system = system or System()
    geometry = geometry or weighted([1] * len(folders))
    durable_bytes = geometry.folder_bytes(sum(durable.values()))
    fixed_bytes = geometry.folder_bytes(sum((fixed or {}).values()))
    scratch_bytes = geometry.folder_bytes(sum(scratch.values()))
    needed = [
        slots * changing + kept + passing
        for changing, kept, passing in zip(durable_bytes, fixed_bytes, scratch_bytes, strict=True)
    ]
    found = [_device_and_free(folder, system) for folder in folders]
    together: dict[int, int] = {}
    for (device, _), count in zip(found, needed, strict=True):
        together[device] = together.get(device, 0) + count
    return [
        FolderBudget(folder=folder, device=device, needed=count, free=free, left=free - together[device])
        for folder, (device, free), count in zip(folders, found, needed, strict=True)
    ]


def check_budget(budget: Sequence[FolderBudget]) -> None:
    """Refuse a store that does not fit.

    Raises:
        StorageError: naming every file system that is too small, what is needed there and what is free.
    """
    lacking: dict[int, list[FolderBudget]] = {}
    for one in budget:
        if one.left < 0:
            lacking.setdefault(one.device, []).append(one)
    problems = []
    for group in lacking.values():
        needed, free, folders = (
            sum(one.needed for one in group),
            group[0].free,
            " and ".join(str(one.folder) for one in group),
        )
        problems.append(
            f"{folders}: the run needs {format_bytes(needed)} of disk ({needed:,} bytes) and "
            f"{format_bytes(free)} is free ({free:,} bytes). Free {format_bytes(needed - free)} there, or "
            f"choose a folder on a larger disk with engine.storage"
        )
    if problems:
        raise StorageError("\n".join(problems))


def free_bytes(folder: Path, system: System) -> int:
    """Bytes free for this user on the file system of an existing folder.

    Raises:
        StorageError: it cannot be found out.
    """
    try:
        return uninterrupted(system.free_bytes, folder)
    except OSError as error:
        raise StorageError(f"cannot find out how much disk is free in {folder}: {reason(error)}") from error


def _device_and_free(folder: Path, system: System) -> tuple[int, int]:
    """Of the file system that a folder is on or would be made on."""
    path = folder.absolute()
    while True:
        try:
            return uninterrupted(system.stat, path).st_dev, free_bytes(path, system)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or path == path.parent:
                raise StorageError(f"cannot find out how much disk is free in {folder}: {reason(error)}") from error
            path = path.parent
