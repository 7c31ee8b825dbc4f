"""Deleting a store, and nothing else."""

import contextlib
import stat
from collections.abc import Sequence
from pathlib import Path

from greedysnake.errors import StorageError
from greedysnake.storage.folders import HeldFolders, check_folders
from greedysnake.storage.identity import Identity, check_identities
from greedysnake.storage.manifest import Manifest
from greedysnake.storage.names import (
    IDENTITY_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    OWNER_FOLDER,
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
        folders: all folders of the store, in its order.
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
        for path in paths:
            remove_file(system, path / MANIFEST_NAME)
            flush_folder(system, path)
        _remove_owners(paths[0] / OWNER_FOLDER, system)
        marks = [SLOT_NAMES[0] if len(paths) == 1 else IDENTITY_NAME, LOCK_NAME]  # show a second call what is left
        for path in paths:
            for name in {RATE_NAME, SCRATCH_NAME, *SLOT_NAMES} - set(marks):
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
    """Refuse folders that do not all belong to one store.

    Raises:
        StorageError: naming what is wrong.
    """
    for folder in folders:
        names = set(names_in(system, folder))
        # A damaged manifest alone shows nothing; the files beside it do.
        if not (LOCK_NAME in names and (SLOT_NAMES[0] in names or IDENTITY_NAME in names)):
            raise StorageError(f"{folder} is not the folder of a store, so nothing in it is deleted")
    try:
        manifest = Manifest.read(folders[0], system)
    except StorageError:
        _check_parts(folders, system)
    else:
        check_identities(folders, manifest, system)


def _check_parts(folders: Sequence[Path], system: System) -> None:
    """The same of a store without a readable manifest."""
    identities = []
    for folder in folders:
        with contextlib.suppress(StorageError):  # one that is damaged shows nothing
            identities.append(Identity.read(folder, system))
    known = [identity for identity in identities if identity is not None]
    if len({identity.store for identity in known}) > 1:
        raise StorageError(f"{' and '.join(map(str, folders))} belong to different stores. Delete one at a time")
    if known and known[0].count != len(folders):
        raise StorageError(
            f"{folders[0]} is {known[0]}, and {len(folders)} folders were given. Give all of them to delete the store"
        )


def _remove_owners(folder: Path, system: System) -> None:
    """Delete the files that the store's owner added; not the folders, which it never adds."""
    try:
        if not stat.S_ISDIR(system.lstat(folder).st_mode):
            return
        for name in names_in(system, folder):
            if not stat.S_ISDIR(system.lstat(folder / name).st_mode):
                remove_file(system, folder / name)
        with contextlib.suppress(OSError):
            uninterrupted(system.rmdir, folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot remove {folder}: {reason(error)}") from error
