"""The files of a run's folder: they last, and where they cannot be written one line says so."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from greedysnake.errors import StorageError
from greedysnake.storage import System
from greedysnake.storage.small_files import flush_folder, sync_tree
from greedysnake.storage.system import reason

BEST_FOLDER = "best"
"""In a run's folder: the weights of its lowest loss on held-out text."""


@contextmanager
def writing(run: Path) -> Iterator[None]:
    """Around whatever writes a run's files.

    Raises:
        StorageError: they cannot be written.
    """
    try:
        yield
    except BrokenPipeError:  # of the output
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write to the run folder {run}: {reason(error)}. Free space there, or see to its disk"
        ) from error


def make_last(folder: Path, parents: Iterable[Path]) -> None:
    """Have a folder with all of its files, and the folders above it that were made with it, survive a power cut.

    Raises:
        StorageError: the disk cannot be flushed.
    """
    sync_tree(System(), folder)
    for parent in parents:
        with suppress(StorageError):  # of a parent that may be written to and not be read
            flush_folder(System(), parent.parent)
