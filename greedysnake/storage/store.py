"""Folders of preallocated files that hold a run's weights and optimizer state.

Durable extents have two slots. Writes go to the slot that is *not* committed, so a commit (flush, then
one rename) copies nothing and a crash or a rollback at any instant leaves the last commit whole.
Fixed extents have one slot: each is written before the first commit that names it, and only read from then on.
Scratch extents have one slot and no promise. The store knows bytes by key and nothing of models.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from greedysnake.errors import StorageError
from greedysnake.storage.budget import FolderBudget, check_budget, disk_budget, store_bytes
from greedysnake.storage.checked import read_checked
from greedysnake.storage.extents import Extents
from greedysnake.storage.files import Transfer
from greedysnake.storage.folders import (
    HeldFolders,
    check_folders,
    make_folders,
    unmake_folders,
)
from greedysnake.storage.geometry import STRIPE_BYTES, Geometry, arranged, weighted
from greedysnake.storage.identity import check_identities, read_first_manifest, write_identities
from greedysnake.storage.manifest import Manifest
from greedysnake.storage.names import OWNER_FOLDER
from greedysnake.storage.rates import measured_geometry
from greedysnake.storage.slots import Slots
from greedysnake.storage.small_files import flush_folder, remove_temporary, sync_tree
from greedysnake.storage.system import System
from greedysnake.storage.vacancy import check_only_own, check_vacant, clear, give_up, give_up_locks
from greedysnake.storage.verify import Damage, damages


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
        self._has_commit = not create
        self._failure: str | None = None
        self._slots = Slots(manifest)
        self._extents = Extents(held, manifest, create=create, writable=writable)

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
            undo.callback(store._extents.close)
            store.reserve_scratch(scratch)
            for path in paths:
                flush_folder(system, path)
            undo.pop_all()
            return store

    @classmethod
    def open(
        cls,
        folders: Sequence[Path],
        *,
        writable: bool = False,
        accept_mixed: Callable[[dict[str, Any]], bool] | None = None,
        system: System | None = None,
    ) -> tuple[Self, dict[str, Any]]:
        """A committed store as its last commit left it, and the contents given to that commit.

        Args:
            folders: all that the store was made with, in that order.
            writable: to go on writing and committing; it has no scratch extents until :meth:`reserve_scratch`.
            accept_mixed: whether a commit with such contents is of use in a store of one slot that was written to after
                it, as the caller knows which extents were not, and verifies those; None: no commit is.
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
            if manifest.dirty and not (accept_mixed and accept_mixed(manifest.contents)):
                raise StorageError(
                    f"the store in {paths[0]} has one slot and was being written to when its run ended, so it holds a "
                    f"mixture of its last commit and what came after, which nothing can use. Start the run again in an "
                    f"empty folder; a store with two slots keeps its last commit at any instant"
                )
            store = cls(held, manifest, create=False, writable=writable)
            undo.callback(store._extents.close)
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
        return self._slots.committed.geometry

    @property
    def disk_bytes(self) -> int:
        """Bytes of disk that the files take."""
        return self._extents.disk_bytes

    def disk_use(self) -> list[FolderBudget]:
        """Bytes that the files take in each folder, and what is left there."""
        return self._extents.disk_use()

    def reserve_scratch(self, scratch: Mapping[str, int]) -> None:
        """Replace the scratch extents; what they held is lost.

        Raises:
            StorageError: the disk is too small; the store has no scratch extents then.
        """
        self._check_writable()
        self._extents.replace_scratch(scratch)

    # Bytes in and out

    def read(self, key: str, into: Tensor, offset: int = 0) -> Transfer:
        """Start filling ``into`` (uint8, page-aligned, whole blocks) from ``offset`` bytes into an extent.

        In a store that was opened for reading alone every byte is compared with the checksums of its commit.
        """
        file = self._extents.file(key, self._slots.latest(key))
        start = self._extents.start(key, offset, into.numel())
        file.check([into], start)
        self.read_bytes += into.numel()
        if not self._writable and (extent := self._extents.written(self._slots.committed, key)).checksums:
            return Transfer(read_checked(extent, into, offset))
        return Transfer(file.read(into, start))

    def write(self, key: str, parts: Sequence[Tensor]) -> Transfer:
        """Start writing a whole extent from ``parts`` (uint8, page-aligned, whole blocks), end to end.

        A durable extent is written to its uncommitted slot, and read from there from now on. A fixed one is written
        until a commit names it.

        Raises:
            StorageError: a write or commit failed before.
        """
        fixed = key in self._extents.fixed
        durable = key in self._extents.durable or fixed
        file = self._extents.file(key, self._slots.to_write(key))
        self._check_writable()
        if fixed and self._extents.written(self._slots.committed, key).checksums:
            raise ValueError(f"{key!r} is fixed: the store has a commit, so it is only read")
        count = sum(part.numel() for part in parts)
        if durable and count != self._extents.size(key):
            raise ValueError(f"{key!r} is written whole: it has {self._extents.size(key)} bytes, got {count}")
        start = self._extents.start(key, 0, count)
        file.check(parts, start)
        if durable:
            self._check_sound()
            self._mark_dirty()
            self._slots.wait_for(key)  # two writes of one place at once would leave either's bytes
        pieces = file.write(parts, start, checksum=durable)
        self.written_bytes += count
        if durable:
            self._slots.note_write(key, pieces)
            for piece in pieces:
                piece.add_done_callback(self._note_failure)
        return Transfer(pieces)

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
        if unknown := [key for key in keys if key not in self._extents.durable]:
            raise ValueError(f"the store has no durable extents {unknown}")
        written = self._slots.written(keys)
        if written and self._slots.single:
            raise StorageError(
                f"the store in {self.folders[0]} has one slot, so what was written to {written[0]!r} since the last "
                f"commit cannot be taken back"
            )
        for key in written:
            self._slots.revert(key)

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
        self._slots.wait_for_all()
        self._check_sound()
        manifest = self._slots.next_commit(contents)
        try:
            if not self._has_commit:
                sync_tree(self._held.system, self.folders[0] / OWNER_FOLDER)
            named = not self._has_commit or bool(self._slots.written(list(self._extents.fixed)))
            self._extents.sync(fixed=named)  # at first for the file's size
            manifest.write(self.folders[0], self._held.system)
        except StorageError as error:
            self._failure = f"a commit failed: {error}"
            raise
        self._slots.note_commit(manifest)
        self._has_commit = True

    def sync_owner_files(self) -> None:
        """Make what the store's owner has put beside the first folder's files last; the first commit does so itself.

        Raises:
            StorageError: the disk cannot be flushed.
        """
        if self._has_commit:
            sync_tree(self._held.system, self.folders[0] / OWNER_FOLDER)

    def _mark_dirty(self) -> None:
        """Before the only copy of a commit is written over: make sure that nobody believes it any more."""
        committed = self._slots.committed
        if not self._slots.single or not self._has_commit or committed.dirty:
            return
        manifest = committed.model_copy(update={"dirty": True})
        try:
            manifest.write(self.folders[0], self._held.system)
        except StorageError as error:
            self._failure = f"a write failed: {error}"
            raise
        self._slots.committed = manifest

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
        if self._slots.single and self._slots.written():
            raise StorageError(
                f"the store in {self.folders[0]} has one slot and was written to since its last commit, so there is "
                f"nothing to verify until the next"
            )
        pieces = self._extents.committed_pieces(self._slots.committed, keys)
        return damages(pieces, progress)

    def close(self) -> None:
        """Wait for transfers, close the files and free the folders; what is not committed is lost."""
        self._extents.close()
        self._held.release()
