"""crc32c (Castagnoli, as in RFC 3720) of pieces, for which processors have an instruction."""

from collections.abc import Iterable, Mapping

from crc32c import crc32c

from greedysnake.storage.geometry import Geometry, place
from greedysnake.storage.memory import aligned_empty, as_bytes


def checksum_of(views: Iterable[memoryview]) -> int:
    """Checksum of pieces of memory end to end. Other threads run meanwhile."""
    value = 0
    for view in views:
        value = crc32c(view, value)
    return value


def zero_checksums(extents: Mapping[str, int], geometry: Geometry) -> list[list[int]]:
    """Checksums of extents that were never written: preallocated files hold zeroes."""
    zeroes = as_bytes(aligned_empty(geometry.stripe_bytes))
    known: dict[int, int] = {}
    found = []
    for key, start in place(extents).items():
        lengths = [piece.length for piece in geometry.pieces(start, extents[key])]
        for length in lengths:
            if length not in known:
                known[length] = checksum_of([zeroes[:length]])
        found.append([known[length] for length in lengths])
    return found
