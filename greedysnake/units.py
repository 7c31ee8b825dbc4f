"""Sizes and counts as people write them: ``"16GiB"``, ``"400M"``, a plain count of bytes; ``"1.5B"`` tokens."""

import re
from decimal import Decimal, InvalidOperation

_FACTOR = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

_MOST_BYTES = 2**63 - 1

_COUNT_FACTOR = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MOST_DIGITS = 40


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
    size_bytes = float(match[1]) * _FACTOR[match[2].upper()]
    if size_bytes > _MOST_BYTES:
        raise ValueError(f"{size!r} is larger than any memory or disk")
    return int(size_bytes)


def parse_count(count: object) -> int:
    """A count such as ``"20M"``, ``"1.5B"``, ``3e9`` or ``1000``; suffixes K, M, B or G, and T are powers of 1000.

    Raises:
        ValueError: ``count`` is not a number above 0; a part of one is not a count either.
    """
    text = str(count).strip().upper() if isinstance(count, str | int | float) and not isinstance(count, bool) else ""
    suffix = text[-1:] if text[-1:] in _COUNT_FACTOR else ""
    try:
        number = Decimal(text.removesuffix(suffix) if len(text) <= _MOST_DIGITS else "") * _COUNT_FACTOR[suffix]
        whole = int(number) if number.is_finite() and number.adjusted() < _MOST_DIGITS else 0
    except InvalidOperation:
        number, whole = Decimal(0), 0
    if whole <= 0 or whole != number:
        raise ValueError(f"{count!r} is not a count; write it like '20M', '1.5B', 3e9 or 1000")
    return whole


def format_bytes(count: float) -> str:
    """``count`` bytes as a person reads them: ``format_bytes(1536)`` is '1.5 KiB'."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if suffix == "B" else f"{count:.3g} {suffix}"
        count /= 1024
    return f"{count:.3g} TiB"
