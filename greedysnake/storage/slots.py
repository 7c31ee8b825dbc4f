"""Which slot of each durable extent holds what: the last commit, or what was written since."""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from greedysnake.storage.manifest import Manifest


class Slots:
    """The last commit of a store, and what has been written to it since.

    Attributes:
        committed: of a store without a commit: what its files hold from the beginning.

    Args:
        committed: likewise.
    """

    def __init__(self, committed: Manifest) -> None:
        self.committed = committed
        self._committed = self._slots_of(committed)
        self._latest = dict(self._committed)  # the one thing that a reading thread looks at
        self._written: dict[str, list[Future[int]]] = {}  # pieces of each extent, which give checksums

    @staticmethod
    def _slots_of(manifest: Manifest) -> dict[str, int]:
        return {key: slot for (key, _), slot in zip(manifest.extents, manifest.slots, strict=True)}

    @property
    def single(self) -> bool:
        """Whether there is one slot, so that writes go over what is committed."""
        return self.committed.slot_count == 1

    def latest(self, key: str) -> int | None:
        """The slot with the latest content of an extent; None: it is not durable."""
        return self._latest.get(key)

    def to_write(self, key: str) -> int | None:
        """The slot that an extent is written to until the next commit; None: it is not durable."""
        return self._to_write(key) if key in self._committed else None

    def _to_write(self, key: str) -> int:
        return 0 if self.single else 1 - self._committed[key]

    def wait_for(self, key: str) -> None:
        """Return when no write to an extent is under way."""
        wait(self._written.get(key, ()))

    def wait_for_all(self) -> None:
        """Return when no write is under way."""
        for pieces in self._written.values():
            wait(pieces)

    def note_write(self, key: str, pieces: list[Future[int]]) -> None:
        """From now on the latest content of an extent is what these pieces write, whose results are checksums."""
        self._written[key] = pieces
        if key in self._committed:
            self._latest[key] = self._to_write(key)

    def written(self, keys: Sequence[str] | None = None) -> list[str]:
        """Those of ``keys``, or of all extents, that were written since the last commit."""
        return [key for key in (self._written if keys is None else keys) if key in self._written]

    def revert(self, key: str) -> None:
        """Forget what was written to a durable extent since the last commit."""
        wait(self._written.pop(key))
        self._latest[key] = self._committed[key]

    def next_commit(self, contents: dict[str, Any]) -> Manifest:
        """What is committed next, with the checksums of all that was written; no write may be under way."""
        committed = self.committed
        durable = [key for key, _ in committed.extents]
        fixed = [key for key, _ in committed.fixed]
        update = {
            "slots": [self._to_write(key) if key in self._written else self._committed[key] for key in durable],
            "checksums": list(map(self._checksums, durable, committed.checksums)),
            "fixed_checksums": list(map(self._checksums, fixed, committed.fixed_checksums)),
            "contents": contents,
            "dirty": False,
        }
        return committed.model_copy(update=update)

    def _checksums(self, key: str, kept: list[int]) -> list[int]:
        """Of an extent's latest content; ``kept``: of what is committed."""
        return [piece.result() for piece in self._written[key]] if key in self._written else kept

    def note_commit(self, manifest: Manifest) -> None:
        """What :meth:`next_commit` gave is the last commit now."""
        self.committed = manifest
        self._committed = self._slots_of(manifest)
        self._written = {}
