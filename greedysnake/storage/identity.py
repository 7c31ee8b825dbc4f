"""The file that says which part of which store a folder is, where a store has several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from greedysnake.errors import StorageError
from greedysnake.storage.manifest import FORMAT_VERSION, Manifest
from greedysnake.storage.names import IDENTITY_NAME, MANIFEST_NAME
from greedysnake.storage.small_files import read_sealed, replace_file, sealed
from greedysnake.storage.system import System

FORMAT: Literal["greedysnake-store-folder"] = "greedysnake-store-folder"


class Identity(BaseModel):
    """Which part of a store a folder is.

    Attributes:
        run: identity of the run that made the store.
        store: identity of the store, as in its manifest.
        index: number of the folder, from 0.
        count: how many folders the store has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["greedysnake-store-folder"] = FORMAT
    version: int = FORMAT_VERSION
    run: str
    store: str
    index: int
    count: int

    def __str__(self) -> str:
        """For messages."""
        return f"folder {self.index + 1} of {self.count} of the store of run {self.run}"

    def write(self, folder: Path, system: System) -> None:
        """Put it into the folder.

        Raises:
            StorageError: the folder cannot be written.
        """
        replace_file(system, folder / IDENTITY_NAME, sealed(self.model_dump_json().encode()))

    @classmethod
    def read(cls, folder: Path, system: System) -> Self | None:
        """The folder's identity, or None if it has none.

        Raises:
            StorageError: it cannot be read or is damaged.
        """
        what = "the identity of a store's folder"
        return read_sealed(system, folder / IDENTITY_NAME, cls, form=FORMAT, version=FORMAT_VERSION, what=what)


def read_first_manifest(folders: Sequence[Path], system: System) -> Manifest:
    """The manifest in the first of a store's folders.

    Raises:
        StorageError: there is none, it cannot be read, or the first folder is another part of a store.
    """
    try:
        return Manifest.read(folders[0], system)
    except StorageError:
        identity = Identity.read(folders[0], system)
        if identity is not None and identity.index != 0:
            raise StorageError(
                f"{folders[0]} is {identity}, and was given first. Give all folders in the order in which the store "
                f"was made; the one that holds {MANIFEST_NAME} is the first"
            ) from None
        raise


def write_identities(folders: Sequence[Path], manifest: Manifest, system: System) -> None:
    """Tell the folders of a store of several what they are.

    Raises:
        StorageError: one cannot be written.
    """
    for index, folder in enumerate(folders if len(folders) > 1 else []):
        Identity(run=manifest.run, store=manifest.store, index=index, count=len(folders)).write(folder, system)


def check_identities(folders: Sequence[Path], manifest: Manifest, system: System) -> None:
    """Refuse folders that are not exactly the store's, in its order.

    Raises:
        StorageError: naming the first that is not.
    """
    count = len(manifest.geometry.weights)
    if len(folders) != count:
        raise StorageError(
            f"the store in {folders[0]} has {count} folders, and {len(folders)} given: "
            f"{', '.join(map(str, folders))}. Give all of them, in the order in which the store was made"
        )
    for index, folder in enumerate(folders if count > 1 else []):
        wanted = Identity(run=manifest.run, store=manifest.store, index=index, count=count)
        found = Identity.read(folder, system)
        if found == wanted:
            continue
        if found is None:
            raise StorageError(
                f"{folder} holds no {IDENTITY_NAME}, so it is not {wanted}. Check that its disk is mounted there"
            )
        if found.store == wanted.store:
            raise StorageError(
                f"{folder} is {found}, and was given in place {index + 1}. Give the folders in the order in which the "
                f"store was made"
            )
        raise StorageError(
            f"{folder} is {found}, a different store from that in {folders[0]}, which is of run "
            f"{manifest.run}. Give the folders of one store"
        )
