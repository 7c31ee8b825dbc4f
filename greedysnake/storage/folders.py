"""The folders of a store: made, checked, locked, each with threads of its own."""

import contextlib
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from greedysnake.errors import StorageError
from greedysnake.storage.files import BlockFile
from greedysnake.storage.geometry import Geometry
from greedysnake.storage.locks import FolderLock
from greedysnake.storage.small_files import remove_file, sync_folder
from greedysnake.storage.striping import StripedFile
from greedysnake.storage.system import System, reason, uninterrupted

READ_THREADS = 4
"""Of each folder."""
WRITE_THREADS = 8
"""Of each folder. Each piece is checksummed before it is written, so at any time some of them compute: with 4 the disk
reached 84 % of what fio gets from it, with 8 all of it."""


class HeldFolders:
    """Folders locked for this process, and the threads that move bytes in them.

    Each folder and direction has its own threads, so that a slow disk does not hold up another, and a read never
    queues behind write-backs.

    Attributes:
        paths: the folders.
        system: the system calls.

    Args:
        paths: existing folders.
        writable: whether they will be written to.
        system: the system calls.

    Raises:
        StorageError: one of them is in use or cannot be locked.
    """

    def __init__(self, paths: Sequence[Path], *, writable: bool, system: System) -> None:
        self.paths = tuple(paths)
        self.system = system
        self._locks: list[FolderLock] = []
        self._readers = [ThreadPoolExecutor(READ_THREADS, thread_name_prefix="greedysnake-read") for _ in paths]
        self._writers = [ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="greedysnake-write") for _ in paths]
        try:
            for path in self.paths:
                self._locks.append(FolderLock(path, writable=writable, system=system))
        except BaseException:
            self.release()
            raise

    def block_file(self, folder: int, name: str, size: int, *, create: bool, writable: bool) -> BlockFile:
        """One folder's file of a name, see :class:`BlockFile`."""
        return BlockFile(
            self.paths[folder] / name,
            self._readers[folder],
            self._writers[folder],
            size=size,
            create=create,
            writable=writable,
            system=self.system,
        )

    def striped_file(self, name: str, geometry: Geometry, total: int, *, create: bool, writable: bool) -> StripedFile:
        """Every folder's file of a name, as one of ``total`` bytes.

        Raises:
            StorageError: one of them cannot be made or opened; those that were made are gone again.
        """
        files: list[BlockFile] = []
        try:
            for folder, size in enumerate(geometry.folder_bytes(total)):
                files.append(self.block_file(folder, name, size, create=create, writable=writable))
        except BaseException:
            for file in files:
                file.close()
            if create:
                self.remove(name)
            raise
        return StripedFile(files, geometry)

    def remove(self, name: str) -> None:
        """Remove every folder's file of a name, as far as that is possible."""
        for path in self.paths:
            with contextlib.suppress(StorageError):
                remove_file(self.system, path / name)

    def stop(self) -> None:
        """Wait for the threads to finish; doing so twice does nothing."""
        for pool in (*self._readers, *self._writers):
            pool.shutdown(wait=True)

    def release(self) -> None:
        """Stop, and let other processes have the folders."""
        self.stop()
        for lock in self._locks:
            lock.release()


def make_folders(folders: Sequence[Path], system: System) -> list[Path]:
    """Make folders that are missing, with their parents; those that were made, parents first.

    Raises:
        StorageError: one cannot be made.
    """
    made: list[Path] = []
    for folder in folders:
        missing: list[Path] = []
        try:
            path = folder
            while path != path.parent and not _exists(path, system):
                missing.append(path)
                path = path.parent
            for path in reversed(missing):
                uninterrupted(system.mkdir, path)
                made.append(path)
            for path in (folder, *folder.parents)[:-1]:  # the last has no name in another
                # What is there may have been made by a process that was killed before it flushed this; what was made
                # here may be in a folder that may be written to and not be read.
                with contextlib.suppress(PermissionError if path in missing else OSError):
                    sync_folder(system, path.parent)
            if not missing and not stat.S_ISDIR(uninterrupted(system.stat, folder).st_mode):
                raise FileExistsError(0, "File exists")
        except OSError as error:
            unmake_folders(made, system)
            raise StorageError(f"cannot make the storage folder {folder}: {reason(error)}") from error
    return made


def unmake_folders(made: Sequence[Path], system: System) -> None:
    """Remove folders that :func:`make_folders` made, where they are empty."""
    for folder in reversed(made):
        with contextlib.suppress(OSError):
            uninterrupted(system.rmdir, folder)


def _exists(path: Path, system: System) -> bool:
    try:
        uninterrupted(system.lstat, path)
    except FileNotFoundError:
        return False
    return True


def check_folders(folders: Sequence[Path], system: System) -> None:
    """Refuse what is not a folder, or is given twice.

    Raises:
        StorageError: naming it.
    """
    seen: dict[tuple[int, int], Path] = {}
    for folder in folders:
        try:
            status = uninterrupted(system.stat, folder)
        except (FileNotFoundError, NotADirectoryError):
            status = None
        except OSError as error:
            raise StorageError(f"cannot read the storage folder {folder}: {reason(error)}") from error
        if status is None or not stat.S_ISDIR(status.st_mode):
            raise StorageError(
                f"{folder} is not a folder, so there is no store to read. If it was moved, or its disk is not mounted, "
                f"bring it back; if it was deleted, begin a new run"
            )
        place = (status.st_dev, status.st_ino)
        if place in seen:
            raise StorageError(
                f"{seen[place]} and {folder} are the same folder. Give each storage folder once, best one on each disk"
            )
        seen[place] = folder
