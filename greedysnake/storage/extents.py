"""The extents of a store: which bytes of which file each of them is."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from greedysnake.storage.budget import FolderBudget, check_budget, disk_budget, store_bytes
from greedysnake.storage.checked import WrittenExtent
from greedysnake.storage.folders import HeldFolders
from greedysnake.storage.geometry import arranged, place
from greedysnake.storage.manifest import Manifest
from greedysnake.storage.names import FIXED_NAME, SCRATCH_NAME, SLOT_NAMES
from greedysnake.storage.small_files import remove_file
from greedysnake.storage.striping import StripedFile, sync_all
from greedysnake.storage.verify import CommittedPiece


class Extents:
    """A store's files, and where in them each extent lies.

    Attributes:
        durable, fixed, scratch: bytes of each extent, in file order.

    Args:
        held: the folders. They stay held when making this fails, but their threads have stopped.
        manifest: the extents and how they are laid out.
        create: whether the files are made, of a new store.
        writable: whether there will be writes to durable extents, and to fixed ones that no commit names yet.

    Raises:
        StorageError: a file cannot be made or opened.
    """

    def __init__(self, held: HeldFolders, manifest: Manifest, *, create: bool, writable: bool) -> None:
        self.durable = dict(manifest.extents)
        self.fixed = dict(manifest.fixed)
        self.scratch: dict[str, int] = {}
        self._held = held
        self._geometry = manifest.geometry
        self._offsets = place(self.durable) | place(self.fixed)
        self._numbers = {key: at for extents in (self.durable, self.fixed) for at, key in enumerate(extents)}
        self._slot_files: list[StripedFile] = []
        self._fixed_file: StripedFile | None = None
        self._scratch_file: StripedFile | None = None
        try:
            for name in SLOT_NAMES[: manifest.slot_count]:
                self._slot_files.append(self._open(name, self.durable, create=create, writable=writable))
            if self.fixed:
                unfinished = writable and not all(manifest.fixed_checksums)
                self._fixed_file = self._open(FIXED_NAME, self.fixed, create=create, writable=create or unfinished)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, extents: Mapping[str, int], *, create: bool, writable: bool) -> StripedFile:
        total = sum(extents.values())
        return self._held.striped_file(name, self._geometry, total, create=create, writable=writable)

    def replace_scratch(self, scratch: Mapping[str, int]) -> None:
        """Have other scratch extents; what the former ones held is lost.

        Raises:
            StorageError: the disk is too small; there are no scratch extents then.
        """
        scratch = arranged(scratch, self._geometry.stripe_bytes)
        if twice := scratch.keys() & (self.durable.keys() | self.fixed.keys()):
            raise ValueError(f"extents {sorted(twice)} are both durable and scratch")
        if self._scratch_file is not None:
            self._scratch_file.close()
            self._scratch_file = None
        for key in self.scratch:
            del self._offsets[key]
        self.scratch = {}
        folders, system = self._held.paths, self._held.system
        for folder in folders:
            remove_file(system, folder / SCRATCH_NAME)
        check_budget(disk_budget(folders, {}, scratch, geometry=self._geometry, system=system))
        self._scratch_file = self._open(SCRATCH_NAME, scratch, create=True, writable=True)
        self.scratch = scratch
        self._offsets |= place(scratch)

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk that the files take."""
        return store_bytes(self.durable, self.scratch, slots=len(self._slot_files), fixed=self.fixed)

    def disk_use(self) -> list[FolderBudget]:
        """Bytes that the files take in each folder, and what is left there."""
        use = disk_budget(
            self._held.paths,
            self.durable,
            self.scratch,
            slots=len(self._slot_files),
            fixed=self.fixed,
            geometry=self._geometry,
            system=self._held.system,
        )
        return [replace(one, left=one.free) for one in use]  # all of it has been reserved

    def file(self, key: str, slot: int | None) -> StripedFile:
        """The file that holds an extent.

        Args:
            key: of the extent.
            slot: of a durable extent; None of any other.

        Raises:
            ValueError: there is no such extent.
        """
        if key not in self._offsets:
            raise ValueError(f"the store has no extent {key!r}")
        if slot is not None:
            return self._slot_files[slot]
        file = self._fixed_file if key in self.fixed else self._scratch_file
        assert file is not None
        return file

    def size(self, key: str) -> int:
        """Bytes of an extent."""
        return next(extents[key] for extents in (self.durable, self.fixed, self.scratch) if key in extents)

    def start(self, key: str, offset: int, count: int) -> int:
        """Where in its file a range of an extent begins.

        Raises:
            ValueError: the range is not inside the extent.
        """
        size = self.size(key)
        if offset < 0 or offset + count > size:
            raise ValueError(f"bytes {offset} to {offset + count} are outside extent {key!r} of {size} bytes")
        return self._offsets[key] + offset

    def written(self, committed: Manifest, key: str) -> WrittenExtent:
        """A durable or fixed extent as a commit has it; without checksums a fixed one that was not written by then."""
        at, fixed = self._numbers[key], key in self.fixed
        return WrittenExtent(
            key=key,
            file=self.file(key, None if fixed else committed.slots[at]),
            start=self._offsets[key],
            size=self.size(key),
            checksums=(committed.fixed_checksums if fixed else committed.checksums)[at],
        )

    def committed_pieces(self, committed: Manifest, keys: Collection[str] | None) -> list[CommittedPiece]:
        """The pieces of a commit with their checksums: of the extents ``keys``; None: of all."""
        named = [key for key in self._numbers if keys is None or key in keys]
        extents = [self.written(committed, key) for key in named]
        return [piece for extent in extents if extent.checksums for piece in extent.pieces()]

    def sync(self, *, fixed: bool) -> None:
        """Return when what was written to durable extents, and with ``fixed`` to fixed ones, is on the devices.

        Raises:
            StorageError: it may not be.
        """
        changed = [self._fixed_file] if fixed and self._fixed_file is not None else []
        sync_all([*self._slot_files, *changed])

    def close(self) -> None:
        """Wait for transfers and close the files; doing so twice does nothing."""
        self._held.stop()
        for file in (*self._slot_files, self._fixed_file, self._scratch_file):
            if file is not None:
                file.close()
