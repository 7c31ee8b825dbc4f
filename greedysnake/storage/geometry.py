"""Where each byte of a striped file lies: which folder's file, and where in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from greedysnake.storage.memory import BLOCK_BYTES

STRIPE_BYTES = 8 * 2**20
"""Also the most that one system call moves: enough for the full rate of a disk, little enough to keep several busy."""

MAX_FOLDERS = 256
MAX_WEIGHT = 64


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighbouring bytes that lie together.

    Attributes:
        folder: number of the folder.
        offset: first byte in that folder's file.
        start: first byte of the logical file.
        length: bytes.
    """

    folder: int
    offset: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Stripes of a logical file dealt to folders by a pattern that repeats.

    Attributes:
        pattern: folder of each stripe of a round; every folder from 0 on occurs.
        stripe_bytes: size of a stripe, whole blocks.

    Raises:
        ValueError: there is no such geometry.
    """

    pattern: tuple[int, ...]
    stripe_bytes: int = STRIPE_BYTES

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        folders = set(self.pattern)
        if not folders or folders != set(range(len(folders))) or len(folders) > MAX_FOLDERS:
            raise ValueError(f"a pattern names 1 to {MAX_FOLDERS} folders from 0 on, not {sorted(folders)[:10]}")
        if max(self.weights) > MAX_WEIGHT:
            raise ValueError(f"a folder occurs at most {MAX_WEIGHT} times in a pattern, not {max(self.weights)} times")
        if self.stripe_bytes <= 0 or self.stripe_bytes % BLOCK_BYTES or self.stripe_bytes > 2**30:
            raise ValueError(
                f"a stripe has whole blocks of {BLOCK_BYTES} bytes, at most 1 GiB, not {self.stripe_bytes}"
            )

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Stripes that each folder gets in a round."""
        return tuple(self.pattern.count(folder) for folder in range(max(self.pattern) + 1))

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """Folder of each stripe of a round, and which of the folder's own stripes it is."""
        return tuple((folder, self.pattern[:at].count(folder)) for at, folder in enumerate(self.pattern))

    def pieces(self, start: int, count: int) -> Iterator[Piece]:
        """The bytes from ``start`` on, cut where stripes end."""
        end = start + count
        while start < end:
            stripe, inside = divmod(start, self.stripe_bytes)
            round_, at = divmod(stripe, len(self.pattern))
            folder, own = self._places[at]
            length = min(self.stripe_bytes - inside, end - start)
            offset = (round_ * self.weights[folder] + own) * self.stripe_bytes + inside
            yield Piece(folder=folder, offset=offset, start=start, length=length)
            start += length

    def folder_bytes(self, total: int) -> tuple[int, ...]:
        """Size of each folder's file when the logical file has ``total`` bytes."""
        rounds, rest = divmod(total, self.stripe_bytes * len(self.pattern))
        sizes = [rounds * weight * self.stripe_bytes for weight in self.weights]
        for piece in self.pieces(0, rest):
            sizes[piece.folder] += piece.length
        return tuple(sizes)


def weighted(weights: Sequence[int], stripe_bytes: int = STRIPE_BYTES) -> Geometry:
    """The geometry in which each folder gets its weight of every round's stripes, spread as evenly as can be.

    Raises:
        ValueError: there is no weight, or one is not from 1 to 64.
    """
    if not weights or not all(1 <= weight <= MAX_WEIGHT for weight in weights):
        raise ValueError(f"weights of folders are integers from 1 to {MAX_WEIGHT}, not {list(weights)}")
    total = sum(weights)
    credit = [0] * len(weights)
    pattern = []
    for _ in range(total):  # smooth weighted round robin: whoever is furthest behind its share is next
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        chosen = max(range(len(weights)), key=lambda folder: (credit[folder], -folder))
        credit[chosen] -= total
        pattern.append(chosen)
    return Geometry(pattern=tuple(pattern), stripe_bytes=stripe_bytes)


def weights_for(rates: Sequence[float], most: int = 8) -> tuple[int, ...]:
    """Small weights with which folders together reach nine tenths of the sum of their rates, or as near as can be.

    A round takes as long as the folder that is busy longest, so the rate of all is the sum of the weights
    over the largest ratio of weight to rate.
    """
    fastest = max(rates)
    best, best_rate = tuple([1] * len(rates)), 0.0
    for scale in range(1, most + 1):
        weights = tuple(max(1, round(rate / fastest * scale)) for rate in rates)
        together = sum(weights) / max(weight / rate for weight, rate in zip(weights, rates, strict=True))
        if together > best_rate * 1.001:
            best, best_rate = weights, together
        if best_rate >= 0.9 * sum(rates):
            break
    return best


def arranged(extents: Mapping[str, int], stripe_bytes: int) -> dict[str, int]:
    """Extents in the order in which they are laid end to end: whole stripes first, so that they are never cut more
    than they must.

    Raises:
        ValueError: an extent is not of whole blocks.
    """
    for key, size in extents.items():
        if size < 0 or size % BLOCK_BYTES:
            raise ValueError(f"extent {key!r} has {size} bytes, which is not a multiple of {BLOCK_BYTES}")
    return dict(sorted(extents.items(), key=lambda item: item[1] % stripe_bytes != 0))


def place(extents: Mapping[str, int]) -> dict[str, int]:
    """Offsets of extents laid end to end."""
    offsets, end = {}, 0
    for key, size in extents.items():
        offsets[key] = end
        end += size
    return offsets
