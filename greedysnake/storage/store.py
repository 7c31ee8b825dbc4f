"""Folders of preallocated files that hold a run's weights and optimizer state.

Durable extents have two slots. Writes go to the slot that is *not* committed, so a commit (flush, then
one rename) copies nothing and a crash or a rollback at any instant leaves the last commit whole.
Fixed extents have one slot: each is written before the first commit that names it, and only read from then on.
Scratch extents have one slot and no promise. The store knows bytes by key and nothing of models.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from greedysnake.errors import StorageError
from greedysnake.storage.budget import FolderBudget, check_budget, disk_budget, store_bytes
from greedysnake.storage.checked import WrittenExtent, read_checked
from greedysnake.storage.files import Transfer
from greedysnake.storage.folders import (
    HeldFolders,
    check_folders,
    make_folders,
    unmake_folders,
)
from greedysnake.storage.geometry import STRIPE_BYTES, Geometry, arranged, place, weighted
from greedysnake.storage.identity import check_identities, read_first_manifest, write_identities
from greedysnake.storage.manifest import Manifest
from greedysnake.storage.names import FIXED_NAME, OWNER_FOLDER, SCRATCH_NAME, SLOT_NAMES
from greedysnake.storage.rates import measured_geometry
from greedysnake.storage.small_files import flush_folder, remove_file, remove_temporary, sync_tree
from greedysnake.storage.striping import StripedFile, sync_all
from greedysnake.storage.system import System
from greedysnake.storage.vacancy import check_only_own, check_vacant, clear, give_up, give_up_locks
from greedysnake.storage.verify import CommittedPiece, Damage, damages


class Store:
    """Durable and scratch extents of bytes in one or more folders.

    Use :meth:`create` for a new store and :meth:`open` for a committed one. One thread owns a store; while
    it waits, one other may start reads and one other writes. Transfers run on threads of the store's own.

    Attributes:
        folders: where the files are; the first holds the manifest.
        read_bytes, written_bytes: bytes moved since it was opened.
    """

    def __init__(self, held: HeldFolders, manifest: Manifest, *, create: bool, writable: bool) -> None:
        self.folders = held.paths
        self.read_bytes = 0
        self.written_bytes = 0
        self._held = held  # let go by close(), or by whoever made the store if making it fails
        self._writable = writable
        self._committed = manifest  # of a store without a commit: what its files hold from the beginning
        self._has_commit = not create
        self._failure: str | None = None
        self._extents = dict(manifest.extents)
        self._slots = dict(zip(self._extents, manifest.slots, strict=True))  # of the last commit
        self._current = dict(self._slots)  # where the latest content is; the one thing that a reading thread looks at
        self._written: dict[str, list[Future[int]]] = {}  # since then: pieces of each extent, which give checksums
        self._scratch: dict[str, int] = {}
        self._fixed = dict(manifest.fixed)
        self._offsets = place(self._extents) | place(self._fixed)
        self._numbers = {key: at for extents in (self._extents, self._fixed) for at, key in enumerate(extents)}
        self._fixed_file: StripedFile | None = None
        self._scratch_file: StripedFile | None = None
        self._files: list[StripedFile] = []
        size = sum(self._extents.values())
        try:
            for name in SLOT_NAMES[: manifest.slot_count]:
                self._files.append(held.striped_file(name, manifest.geometry, size, create=create, writable=writable))
            if self._fixed:
                size = sum(self._fixed.values())
                unfinished = not all(manifest.fixed_checksums)
                self._fixed_file = held.striped_file(
                    FIXED_NAME, manifest.geometry, size, create=create, writable=create or (writable and unfinished)
                )
        except BaseException:
            self._close_files()
            raise

    @classmethod
    def create(
        cls,
        folders: Sequence[Path],
        *,
        run: str,
        durable: Mapping[str, int],
        scratch: Mapping[str, int],
        fixed: Mapping[str, int] | None = None,
        slots: int = 2,
        weights: Sequence[int] | None = None,
        stripe_bytes: int = STRIPE_BYTES,
        system: System | None = None,
    ) -> Self:
        """A new store with all its disk reserved.

        Args:
            folders: one or more, best on a disk each; made if missing; must not hold a store already.
            run: identity of the run, written to the manifest.
            durable, scratch: bytes by key, multiples of 4096.
            fixed: likewise of what is written once, before the first commit after that.
            slots: 2; or 1, which takes half the disk but loses the last commit when the run ends between the first
                write after it and the next commit.
            weights: small integers, the share of the stripes that each folder gets; None: by measured rates.
            stripe_bytes: what goes to one folder at a time, and the most that one system call moves.
            system: the system calls.

        Raises:
            StorageError: a folder is in use, holds another store, cannot be written or is too small.
        """
        if slots not in (1, 2):
            raise ValueError(f"a store has 1 or 2 slots, not {slots}")
        system = system or System()
        paths = [Path(folder) for folder in folders]
        geometry = None if weights is None else weighted(weights, stripe_bytes)
        if not paths or (geometry is not None and len(geometry.weights) != len(paths)):
            raise ValueError(f"{len(paths)} folders do not make a store with weights {weights}")
        with ExitStack() as undo:
            made = make_folders(paths, system)
            undo.callback(unmake_folders, made, system)
            check_folders(paths, system)
            check_only_own(paths, system)  # before a lock leaves a file there
            held = HeldFolders(paths, writable=True, system=system)
            undo.callback(held.release)
            undo.callback(give_up_locks, [path for path in paths if path in made], system)
            check_vacant(paths, system)
            undo.callback(give_up, paths, system)
            clear(paths, system)  # what a run that ended before its first commit left
            total = store_bytes(durable, scratch, slots=slots, fixed=fixed)
            geometry = geometry or measured_geometry(held, total, stripe_bytes)
            durable, fixed = arranged(durable, geometry.stripe_bytes), arranged(fixed or {}, geometry.stripe_bytes)
            check_budget(
                disk_budget(paths, durable, scratch, slots=slots, fixed=fixed, geometry=geometry, system=system)
            )
            manifest = Manifest.of_new_store(run=run, durable=durable, fixed=fixed, geometry=geometry, slots=slots)
            write_identities(paths, manifest, system)
            store = cls(held, manifest, create=True, writable=True)
            undo.callback(store._close_files)
            store.reserve_scratch(scratch)
            for path in paths:
                flush_folder(system, path)
            undo.pop_all()
            return store

    @classmethod
    def open(
        cls, folders: Sequence[Path], *, writable: bool = False, system: System | None = None
    ) -> tuple[Self, dict[str, Any]]:
        """A committed store as its last commit left it, and the contents given to that commit.

        Args:
            folders: all that the store was made with, in that order.
            writable: to go on writing and committing; it has no scratch extents until :meth:`reserve_scratch`.
            system: the system calls.

        Raises:
            StorageError: no committed store there, damaged, not these folders, or in use.
        """
        system = system or System()
        paths = [Path(folder) for folder in folders]
        check_folders(paths, system)
        check_identities(paths, read_first_manifest(paths, system), system)  # before a lock leaves a file there
        with ExitStack() as undo:
            held = HeldFolders(paths, writable=writable, system=system)
            undo.callback(held.release)
            manifest = read_first_manifest(paths, system)  # again: its owner may have committed before it let go
            check_identities(paths, manifest, system)
            if manifest.dirty:
                raise StorageError(
                    f"the store in {paths[0]} has one slot and was being written to when its run ended, so it holds a "
                    f"mixture of its last commit and what came after, which nothing can use. Start the run again in an "
                    f"empty folder; a store with two slots keeps its last commit at any instant"
                )
            store = cls(held, manifest, create=False, writable=writable)
            undo.callback(store._close_files)
            if writable:
                for path in paths:
                    remove_temporary(system, path)
                # The last owner may have ended before its rename was on the disk; a power failure would undo it then,
                # after writes to the slots that the manifest before it names.
                manifest.write(paths[0], system)
            undo.pop_all()
            return store, manifest.contents

    @classmethod
    def contents_of(cls, folders: Sequence[Path], *, system: System | None = None) -> dict[str, Any] | None:
        """The contents given to the last commit of a store, which stays closed; None if there is none to be read."""
        try:
            return read_first_manifest([Path(folder) for folder in folders], system or System()).contents
        except StorageError:
            return None

    @property
    def geometry(self) -> Geometry:
        """Which folder holds which bytes."""
        return self._committed.geometry

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk that the files take."""
        return store_bytes(self._extents, self._scratch, slots=self._committed.slot_count, fixed=self._fixed)

    def disk_use(self) -> list[FolderBudget]:
        """Bytes that the files take in each folder, and what is left there."""
        committed = self._committed
        use = disk_budget(
            self.folders,
            self._extents,
            self._scratch,
            slots=committed.slot_count,
            fixed=self._fixed,
            geometry=committed.geometry,
            system=self._held.system,
        )
        return [replace(one, left=one.free) for one in use]  # all of it has been reserved

    def reserve_scratch(self, scratch: Mapping[str, int]) -> None:
        """Replace the scratch extents; what they held is lost.

        Raises:
            StorageError: the disk is too small; the store has no scratch extents then.
        """
        self._check_writable()
        geometry = self.geometry
        scratch = arranged(scratch, geometry.stripe_bytes)
        if twice := scratch.keys() & (self._extents.keys() | self._fixed.keys()):
            raise ValueError(f"extents {sorted(twice)} are both durable and scratch")
        if self._scratch_file is not None:
            self._scratch_file.close()
            self._scratch_file = None
        for key in self._scratch:
            del self._offsets[key]
        self._scratch = {}
        for folder in self.folders:
            remove_file(self._held.system, folder / SCRATCH_NAME)
        check_budget(disk_budget(self.folders, {}, scratch, geometry=geometry, system=self._held.system))
        self._scratch_file = self._held.striped_file(
            SCRATCH_NAME, geometry, sum(scratch.values()), create=True, writable=True
        )
        self._scratch = dict(scratch)
        self._offsets |= place(scratch)

    # Bytes in and out

    def read(self, key: str, into: Tensor, offset: int = 0) -> Transfer:
        """Start filling ``into`` (uint8, page-aligned, whole blocks) from ``offset`` bytes into an extent.

        In a store that was opened for reading alone every byte is compared with the checksums of its commit.
        """
        file = self._file(key, self._current.get(key))
        self._check_range(key, offset, into.numel())
        start = self._offsets[key] + offset
        file.check([into], start)
        self.read_bytes += into.numel()
        if not self._writable and (extent := self._committed_extent(key)).checksums:
            return Transfer(read_checked(extent, into, offset))
        return Transfer(file.read(into, start))

    def _committed_extent(self, key: str) -> WrittenExtent:
        """A durable or fixed extent as the last commit has it; without checksums a fixed one that it does not name."""
        committed, at = self._committed, self._numbers[key]
        fixed = key in self._fixed
        return WrittenExtent(
            key=key,
            file=self._file(key, None if fixed else committed.slots[at]),
            start=self._offsets[key],
            size=self._size(key),
            checksums=(committed.fixed_checksums if fixed else committed.checksums)[at],
        )

    def _written_pieces(self, key: str) -> list[CommittedPiece]:
        """Those of a durable or fixed extent that the last commit names."""
        extent = self._committed_extent(key)
        return extent.pieces() if extent.checksums else []

    def write(self, key: str, parts: Sequence[Tensor]) -> Transfer:
        """Start writing a whole extent from ``parts`` (uint8, page-aligned, whole blocks), end to end.

        A durable extent is written to its uncommitted slot, and read from there from now on. A fixed one is written
        until a commit names it.

        Raises:
            StorageError: a write or commit failed before.
        """
        fixed = key in self._fixed
        durable = key in self._extents or fixed
        file = self._file(key, self._slot_to_write(key) if key in self._extents else None)
        self._check_writable()
        if fixed and self._committed.fixed_checksums[self._numbers[key]]:
            raise ValueError(f"{key!r} is fixed: the store has a commit, so it is only read")
        count = sum(part.numel() for part in parts)
        if durable and count != self._size(key):
            raise ValueError(f"{key!r} is written whole: it has {self._size(key)} bytes, got {count}")
        self._check_range(key, 0, count)
        start = self._offsets[key]
        file.check(parts, start)
        if durable:
            self._check_sound()
            self._mark_dirty()
            wait(self._written.get(key, ()))  # two writes of one place at once would leave either's bytes
        pieces = file.write(parts, start, checksum=durable)
        self.written_bytes += count
        if durable:
            self._written[key] = pieces
            if not fixed:
                self._current[key] = self._slot_to_write(key)
            for piece in pieces:
                piece.add_done_callback(self._note_failure)
        return Transfer(pieces)

    def _slot_to_write(self, key: str) -> int:
        return 0 if self._committed.slot_count == 1 else 1 - self._slots[key]

    def _file(self, key: str, slot: int | None) -> StripedFile:
        """The file of a durable extent's slot, of a fixed or of a scratch extent."""
        if key not in self._offsets:
            raise ValueError(f"the store has no extent {key!r}")
        if slot is not None:
            return self._files[slot]
        file = self._fixed_file if key in self._fixed else self._scratch_file
        assert file is not None
        return file

    def _size(self, key: str) -> int:
        """Bytes of an extent."""
        return next(extents[key] for extents in (self._extents, self._fixed, self._scratch) if key in extents)

    def _check_range(self, key: str, offset: int, count: int) -> None:
        size = self._size(key)
        if offset < 0 or offset + count > size:
            raise ValueError(f"bytes {offset} to {offset + count} are outside extent {key!r} of {size} bytes")

    def _check_writable(self) -> None:
        if not self._writable:
            raise ValueError(f"the store in {self.folders[0]} was opened for reading; open it with writable=True")

    # Commits

    def revert(self, keys: Iterable[str]) -> None:
        """Forget what was written to durable extents since the last commit.

        Raises:
            StorageError: the store has one slot, so what was there is gone.
        """
        keys = list(keys)
        if unknown := [key for key in keys if key not in self._extents]:
            raise ValueError(f"the store has no durable extents {unknown}")
        written = [key for key in keys if key in self._written]
        if written and self._committed.slot_count == 1:
            raise StorageError(
                f"the store in {self.folders[0]} has one slot, so what was written to {written[0]!r} since the last "
                f"commit cannot be taken back"
            )
        for key in written:
            wait(self._written.pop(key))
            self._current[key] = self._slots[key]

    def commit(self, contents: dict[str, Any]) -> None:
        """Make everything written so far the state that survives a crash; it waits for transfers under way.

        Args:
            contents: JSON values that :meth:`open` gives back.

        Raises:
            StorageError: a write failed, the disk cannot be flushed or the manifest not written. One of the two
                commits, this one or the last, stands, and this store takes no more durable writes, which might
                damage it.
        """
        self._check_writable()
        for pieces in self._written.values():
            wait(pieces)
        self._check_sound()
        manifest = self._next_manifest(contents)
        try:
            if not self._has_commit:
                sync_tree(self._held.system, self.folders[0] / OWNER_FOLDER)
            named = not self._has_commit or self._fixed.keys() & self._written.keys()  # at first for the file's size
            changed = [self._fixed_file] if self._fixed_file is not None and named else []
            sync_all([*self._files, *changed])
            manifest.write(self.folders[0], self._held.system)
        except StorageError as error:
            self._failure = f"a commit failed: {error}"
            raise
        self._committed = manifest
        self._has_commit = True
        self._slots = dict(zip(self._extents, manifest.slots, strict=True))
        self._written = {}

    def sync_owner_files(self) -> None:
        """Make what the store's owner has put beside the first folder's files last; the first commit does so itself.

        Raises:
            StorageError: the disk cannot be flushed.
        """
        if self._has_commit:
            sync_tree(self._held.system, self.folders[0] / OWNER_FOLDER)

    def _next_manifest(self, contents: dict[str, Any]) -> Manifest:
        """What is committed next, with the checksums of all that was written."""
        slots, checksums = [], []
        for key, kept in zip(self._extents, self._committed.checksums, strict=True):
            written = self._written.get(key)
            slots.append(self._slots[key] if written is None else self._slot_to_write(key))
            checksums.append(kept if written is None else [piece.result() for piece in written])
        fixed = [
            kept if key not in self._written else [piece.result() for piece in self._written[key]]
            for key, kept in zip(self._fixed, self._committed.fixed_checksums, strict=True)
        ]
        update = {
            "slots": slots,
            "checksums": checksums,
            "fixed_checksums": fixed,
            "contents": contents,
            "dirty": False,
        }
        return self._committed.model_copy(update=update)

    def _mark_dirty(self) -> None:
        """Before the only copy of a commit is written over: make sure that nobody believes it any more."""
        if self._committed.slot_count == 2 or not self._has_commit or self._committed.dirty:
            return
        manifest = self._committed.model_copy(update={"dirty": True})
        try:
            manifest.write(self.folders[0], self._held.system)
        except StorageError as error:
            self._failure = f"a write failed: {error}"
            raise
        self._committed = manifest

    def _note_failure(self, piece: Future[int]) -> None:
        """Called on a writer's thread: what the extent holds is not known any more, so it is never committed."""
        error = piece.exception()
        if error is not None and self._failure is None:
            self._failure = f"a write failed: {error}"

    def _check_sound(self) -> None:
        """Refuse to write once it is not known what the files or the manifest on disk hold."""
        if self._failure is not None:
            raise StorageError(f"{self.folders[0]} takes no more writes, as {self._failure}")

    def verify(
        self, progress: Callable[[int, int], None] | None = None, *, keys: Collection[str] | None = None
    ) -> list[Damage]:
        """Read everything that the last commit holds and compare it with its checksums.

        Args:
            progress: called with the bytes read so far and those to read, after every piece.
            keys: of the durable extents to read; None: all.

        Returns:
            The pieces that are not as they were written, or cannot be read.

        Raises:
            StorageError: the store has one slot and was written to since the last commit.
        """
        if self._committed.slot_count == 1 and self._written:
            raise StorageError(
                f"the store in {self.folders[0]} has one slot and was written to since its last commit, so there is "
                f"nothing to verify until the next"
            )
        pieces = [
            piece
            for key in (*self._extents, *self._fixed)
            if keys is None or key in keys
            for piece in self._written_pieces(key)
        ]
        return damages(pieces, progress)

    def close(self) -> None:
        """Wait for transfers, close the files and free the folders; what is not committed is lost."""
        self._close_files()
        self._held.release()

    def _close_files(self) -> None:
        self._held.stop()
        for file in (*self._files, self._fixed_file, self._scratch_file):
            if file is not None:
                file.close()
