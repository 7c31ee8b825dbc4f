"""The file that says which slot of each extent is the committed one, and what is in it."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from greedysnake.errors import StorageError
from greedysnake.storage.checksums import zero_checksums
from greedysnake.storage.geometry import Geometry, place
from greedysnake.storage.memory import BLOCK_BYTES
from greedysnake.storage.names import MANIFEST_NAME
from greedysnake.storage.small_files import read_sealed, replace_file, sealed
from greedysnake.storage.system import System

FORMAT: Literal["greedysnake-store"] = "greedysnake-store"
FORMAT_VERSION = 3
_LARGEST_STORE = 2**62  # bytes: file offsets are signed 64-bit numbers

Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class Manifest(BaseModel):
    """A store's contents at its last commit.

    Attributes:
        run: identity of the run that wrote it.
        store: identity of the store itself, which its other folders repeat.
        stripe_bytes, pattern: which folder holds which bytes, see :class:`Geometry`.
        slot_count: slots of each extent, 1 or 2.
        dirty: whether a store of one slot has been written to since the commit, so that what was written over is lost.
        extents: name and bytes of every durable extent, in file order.
        slots: which slot (0 or 1) holds the committed content, an entry an extent.
        checksums: crc32c of each committed piece, a list an extent.
        fixed: name and bytes of every extent that is written once, in file order.
        fixed_checksums: crc32c of each of their pieces, a list an extent; an empty one until it has been written.
        contents: what the store's owner needs to make sense of the extents.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    format: Literal["greedysnake-store"] = FORMAT
    version: int = FORMAT_VERSION
    run: str
    store: str
    stripe_bytes: int
    pattern: list[int]
    slot_count: Literal[1, 2]
    dirty: bool
    extents: list[tuple[str, int]]
    slots: list[int]
    checksums: list[list[Checksum]]
    fixed: list[tuple[str, int]]
    fixed_checksums: list[list[Checksum]]
    contents: dict[str, Any]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        extents = [*self.extents, *self.fixed]
        if len(dict(extents)) != len(extents) or any(size < 0 or size % BLOCK_BYTES for _, size in extents):
            raise ValueError("its extents are not distinct names of whole blocks")
        if sum(size for _, size in extents) > _LARGEST_STORE:
            raise ValueError("its extents are larger than any disk")
        if len(self.slots) != len(self.extents) or not set(self.slots) <= set(range(self.slot_count)):
            raise ValueError("its slots do not match its extents")
        self._check_checksums(dict(self.extents), self.checksums)
        self._check_checksums(dict(self.fixed), self.fixed_checksums, may_lack=True)
        return self

    def _check_checksums(self, sizes: Mapping[str, int], checksums: list[list[int]], *, may_lack: bool = False) -> None:
        """One for each piece of each extent of a file; with ``may_lack`` none at all is right too."""
        stripe = self.geometry.stripe_bytes
        ends = [(start, start + sizes[key]) for key, start in place(sizes).items()]
        counts = [-(-end // stripe) - start // stripe if end > start else 0 for start, end in ends]
        found = [len(own) for own in checksums]
        if len(found) != len(counts) or any(
            have != count and not (may_lack and have == 0) for have, count in zip(found, counts, strict=True)
        ):
            raise ValueError("its checksums do not match its extents")

    @classmethod
    def of_new_store(
        cls, *, run: str, durable: Mapping[str, int], fixed: Mapping[str, int], geometry: Geometry, slots: int
    ) -> Self:
        """What a store holds before its first commit: zeroes.

        Args:
            run: identity of the run.
            durable: bytes of every durable extent, in file order.
            fixed: bytes of every extent that is written once, in file order.
            geometry: which folder holds which bytes.
            slots: 1 or 2.
        """
        return cls(
            run=run,
            store=uuid.uuid4().hex,
            stripe_bytes=geometry.stripe_bytes,
            pattern=list(geometry.pattern),
            slot_count=1 if slots == 1 else 2,
            dirty=False,
            extents=list(durable.items()),
            slots=[0] * len(durable),
            checksums=zero_checksums(durable, geometry),
            fixed=list(fixed.items()),
            fixed_checksums=[[] for _ in fixed],
            contents={},
        )

    @property
    def geometry(self) -> Geometry:
        """Which folder holds which bytes."""
        return Geometry(pattern=tuple(self.pattern), stripe_bytes=self.stripe_bytes)

    def write(self, folder: Path, system: System) -> None:
        """Replace the folder's manifest in one instant: a crash leaves the old one or the new one.

        Raises:
            StorageError: the folder cannot be written.
        """
        replace_file(system, folder / MANIFEST_NAME, sealed(self.model_dump_json().encode()))

    @classmethod
    def read(cls, folder: Path, system: System) -> Self:
        """The folder's manifest.

        Raises:
            StorageError: there is none, or it is not one that this version reads.
        """
        path, what = folder / MANIFEST_NAME, "the manifest of a store"
        manifest = read_sealed(system, path, cls, form=FORMAT, version=FORMAT_VERSION, what=what)
        if manifest is None:
            raise StorageError(
                f"{folder} holds no committed store: {MANIFEST_NAME} is missing. A run commits after every step; "
                f"one that ended before its first step has nothing to read"
            )
        return manifest
