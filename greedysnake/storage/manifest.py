"""The file that says which slot of each extent is the committed one."""

import json
import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from greedysnake.errors import StorageError
from greedysnake.storage.memory import BLOCK_BYTES

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"


class Manifest(BaseModel):
    """A store's contents at its last commit.

    Attributes:
        run: identity of the run that wrote it.
        extents: name and bytes of every durable extent, in file order.
        slots: which of its two slots (0 or 1) holds the committed content, an entry an extent.
        contents: what the store's owner needs to make sense of the extents.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = "greedysnake-store"
    version: int = FORMAT_VERSION
    run: str
    extents: list[tuple[str, int]]
    slots: list[int]
    contents: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest in one instant: a crash leaves the old one or the new one.

        Raises:
            StorageError: the folder cannot be written.
        """
        content = self.model_dump_json().encode()
        temporary = folder / f".{FILE_NAME}.{os.getpid()}"
        try:
            with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / FILE_NAME)
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"cannot write {folder / FILE_NAME}: {error.strerror}") from error

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The folder's manifest.

        Raises:
            StorageError: there is none, or it is not one that this version reads.
        """
        path = folder / FILE_NAME
        try:
            raw = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise StorageError(
                f"{folder} holds no committed store: {FILE_NAME} is missing. A run commits after every step; "
                f"one that ended before its first step has nothing to read"
            ) from error
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error
        if not isinstance(raw, dict) or raw.get("format") != "greedysnake-store":
            raise StorageError(f"{path} is not the manifest of a store")
        if raw.get("version") != FORMAT_VERSION:
            raise StorageError(
                f"{path} has format version {raw.get('version')!r}; this version of greedysnake reads {FORMAT_VERSION}"
            )
        try:
            manifest = cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise StorageError(f"{path} is damaged at {where!r}: {first['msg']}") from error
        sizes = dict(manifest.extents)
        if len(sizes) != len(manifest.extents) or any(size < 0 or size % BLOCK_BYTES for size in sizes.values()):
            raise StorageError(f"{path} is damaged: its extents are not distinct names of whole blocks")
        if len(manifest.slots) != len(manifest.extents) or not set(manifest.slots) <= {0, 1}:
            raise StorageError(f"{path} is damaged: its slots do not match its extents")
        return manifest
