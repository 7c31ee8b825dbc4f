"""Deleting a store, and nothing else."""

import contextlib
import stat
from collections.abc import Sequence
from pathlib import Path

from greedysnake.errors import StorageError
from greedysnake.storage.folders import HeldFolders, check_folders
from greedysnake.storage.identity import Identity
from greedysnake.storage.manifest import Manifest
from greedysnake.storage.names import (
    FIXED_NAME,
    IDENTITY_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    OWNER_FOLDER,
    OWNER_INNER_FOLDERS,
    RATE_NAME,
    SCRATCH_NAME,
    SLOT_NAMES,
)
from greedysnake.storage.small_files import flush_folder, names_in, remove_file, remove_temporary
from greedysnake.storage.system import System, reason, uninterrupted


def remove_store(folders: Sequence[Path], *, system: System | None = None) -> list[Path]:
    """Delete a store: the files that it is made of, then the folders that are empty without them.

    A store that is damaged or was never committed can be deleted too. It is none any more from the first deletion
    on, so what an interrupted call leaves is not taken for one; a second call deletes the rest.

    Args:
        folders: all folders of the store.
        system: the system calls.

    Returns:
        What is still in the folders, as it is not a store's.

    Raises:
        StorageError: one of the folders holds no store or is in use, folders are missing, or something cannot be
            deleted.
    """
    system = system or System()
    paths = [Path(folder) for folder in folders]
    check_folders(paths, system)
    _check_is_store(paths, system)
    held = HeldFolders(paths, writable=True, system=system)
    try:
        _check_is_store(paths, system)  # again: it may have changed before the lock was taken
        owners = [path / OWNER_FOLDER for path in paths if _is_first(path, len(paths), system)]
        for path in paths:
            remove_file(system, path / MANIFEST_NAME)
            flush_folder(system, path)
        for folder in owners:
            _remove_owners(folder, system)
        marks = [SLOT_NAMES[0] if len(paths) == 1 else IDENTITY_NAME, LOCK_NAME]  # show a second call what is left
        for path in paths:
            for name in {RATE_NAME, SCRATCH_NAME, FIXED_NAME, *SLOT_NAMES} - set(marks):
                remove_file(system, path / name)
            remove_temporary(system, path)
        left = [path / name for path in paths for name in names_in(system, path) if name not in marks]
        for path in paths:
            for name in marks:
                remove_file(system, path / name)
            with contextlib.suppress(OSError):
                uninterrupted(system.rmdir, path)
        return left
    finally:
        held.release()


def _check_is_store(folders: Sequence[Path], system: System) -> None:
    """Refuse folders that are not all the folders of one store, as far as they tell; a damaged file tells nothing.

    Raises:
        StorageError: naming what is wrong.
    """
    known: dict[str, tuple[Path, int]] = {}  # stores: where each was found first, and how many folders it has
    for folder in folders:
        names = set(names_in(system, folder))
        if LOCK_NAME not in names or not names & {SLOT_NAMES[0], IDENTITY_NAME}:
            raise StorageError(f"{folder} is not the folder of a store, so nothing in it is deleted")
        if len(folders) > 1 and IDENTITY_NAME not in names:
            raise StorageError(f"{folder} is not one of several folders of a store. Delete it by itself")
        with contextlib.suppress(StorageError):
            identity = Identity.read(folder, system)
            if identity is not None:
                known.setdefault(identity.store, (folder, identity.count))
        with contextlib.suppress(StorageError):
            manifest = Manifest.read(folder, system)
            known.setdefault(manifest.store, (folder, len(manifest.geometry.weights)))
    if len(known) > 1:
        raise StorageError(
            f"{' and '.join(str(folder) for folder, _ in known.values())} belong to different stores. Delete one at "
            f"a time"
        )
    for folder, count in known.values():
        if count != len(folders):
            raise StorageError(
                f"{folder} is one of the {count} folders of a store, and {len(folders)} given: "
                f"{', '.join(map(str, folders))}. Give all of them to delete the store"
            )


def _is_first(folder: Path, count: int, system: System) -> bool:
    if count == 1:
        return True
    try:
        identity = Identity.read(folder, system)
    except StorageError:
        return False
    return identity is not None and identity.index == 0


def _remove_owners(folder: Path, system: System, within: str = "") -> None:
    """Delete what the store's owner added: files, and the folders that it may have made for some of them."""
    try:
        if not stat.S_ISDIR(uninterrupted(system.lstat, folder).st_mode):
            return
        for name in names_in(system, folder):
            if not stat.S_ISDIR(uninterrupted(system.lstat, folder / name).st_mode):
                remove_file(system, folder / name)
            elif f"{within}{name}" in OWNER_INNER_FOLDERS:
                _remove_owners(folder / name, system, f"{within}{name}/")
        with contextlib.suppress(OSError):
            uninterrupted(system.rmdir, folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot remove {folder}: {reason(error)}") from error
