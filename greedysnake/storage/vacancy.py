"""Whether folders are free for a new store, and clearing them of one that was never committed."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from greedysnake.errors import StorageError
from greedysnake.storage.identity import Identity
from greedysnake.storage.names import (
    FIXED_NAME,
    IDENTITY_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    OWNER_FOLDER,
    RATE_NAME,
    SCRATCH_NAME,
    SLOT_NAMES,
    is_own,
)
from greedysnake.storage.small_files import flush_folder, names_in, remove_file, remove_temporary
from greedysnake.storage.system import System


def check_only_own(folders: Sequence[Path], system: System) -> None:
    """Refuse folders that hold anything that is not a store's, unless a store is there.

    Raises:
        StorageError: naming the folder and what it holds.
    """
    for folder in folders:
        found = names_in(system, folder)
        foreign = [name for name in found if not is_own(name)]
        if OWNER_FOLDER in found and SLOT_NAMES[0] not in found:
            foreign.append(OWNER_FOLDER)
        if foreign and MANIFEST_NAME not in found and IDENTITY_NAME not in found:
            raise StorageError(
                f"{folder} holds other files ({', '.join(foreign[:3])}), so it is not used for a store. Choose an "
                f"empty or a new folder with engine.storage"
            )


def check_vacant(folders: Sequence[Path], system: System) -> None:
    """Refuse folders that hold a store, or part of one.

    What a run that ended before its first commit left does not count, if all of it is in these folders.

    Raises:
        StorageError: naming the folder and what it holds.
    """
    for folder in folders:
        if MANIFEST_NAME in names_in(system, folder):
            raise StorageError(
                f"{folder} already holds the store of another run. Choose another folder with engine.storage, "
                f"or delete this one if its run is not needed any more"
            )
    identities = {folder: Identity.read(folder, system) for folder in folders}
    begun = {identity.store for identity in identities.values() if identity is not None and identity.index == 0}
    for folder, identity in identities.items():
        if identity is not None and identity.store not in begun:
            raise StorageError(
                f"{folder} is {identity}. Choose another folder with engine.storage, or delete this one if its run is "
                f"not needed any more"
            )


def clear(folders: Sequence[Path], system: System) -> None:
    """Remove a store's files, except the locks and what its owner added.

    The first folder's identity goes last: without it the others would be taken for parts of a store elsewhere.

    Raises:
        StorageError: one of them cannot be removed.
    """

    def is_first(folder: Path) -> bool:
        identity = Identity.read(folder, system)
        return identity is not None and identity.index == 0

    for folder in sorted(folders, key=is_first):
        for name in (MANIFEST_NAME, IDENTITY_NAME, RATE_NAME, SCRATCH_NAME, FIXED_NAME, *SLOT_NAMES):
            remove_file(system, folder / name)
        remove_temporary(system, folder)
        if len(folders) > 1:
            flush_folder(system, folder)


def give_up(folders: Sequence[Path], system: System) -> None:
    """Take back, as far as possible, what was begun in held folders."""
    with contextlib.suppress(StorageError):
        clear(folders, system)


def give_up_locks(folders: Sequence[Path], system: System) -> None:
    """Remove the lock files from held folders that were made in vain."""
    for folder in folders:
        with contextlib.suppress(StorageError):
            remove_file(system, folder / LOCK_NAME)
