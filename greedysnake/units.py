"""Sizes as people write them: ``"16GiB"``, ``"400M"``, or a plain count of bytes."""

import re

_FACTOR = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Bytes of ``size``; suffixes K, M, G and T are powers of 1024, with or without ``iB`` or ``B``.

    Raises:
        ValueError: ``size`` is not a non-negative size.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"{size!r} is not a size; write it like '16GiB', '400M' or a number of bytes")
    return int(float(match[1]) * _FACTOR[match[2].upper()])


def format_bytes(count: float) -> str:
    """``count`` bytes as a person reads them: ``format_bytes(1536)`` is '1.5 KiB'."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if suffix == "B" else f"{count:.3g} {suffix}"
        count /= 1024
    return f"{count:.3g} TiB"
