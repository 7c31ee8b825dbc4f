"""How a report writes numbers and text: units, 'not measured', and text that is safe inside HTML."""

import html
import re
from collections.abc import Callable

from greedysnake.units import format_bytes

NOT_MEASURED = "not measured"
# Characters that neither HTML nor a UTF-8 file can hold.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def safe(text: object) -> str:
    """``text`` for HTML, inside an element or a quoted attribute."""
    return html.escape(_FORBIDDEN.sub("\ufffd", str(text)), quote=True)


def known(value: float | None, write: Callable[[float], str]) -> str:
    """``value`` as ``write`` has it, or 'not measured'."""
    return NOT_MEASURED if value is None else write(value)


def loss(value: float) -> str:
    """Three decimals, or three digits of what is large."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def short_loss(value: float) -> str:
    """A loss at an axis: without zeros at its end."""
    written = loss(value)
    return written.rstrip("0").rstrip(".") if "." in written and "e" not in written else written


def seconds(value: float) -> str:
    """'1.23 s', '45.6 ms', '7.8 µs'; from two minutes on '3 min 20 s'."""
    if value >= 7199.5:
        return f"{value / 3600:.1f} h"
    if value >= 119.5:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    if value >= 0.9995 or value == 0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def time_scale(whole_s: float) -> tuple[float, str]:
    """What seconds are multiplied by at an axis of ``whole_s`` seconds, and the unit that this gives."""
    return (1.0, "s") if whole_s >= 1 else (1e3, "ms") if whole_s >= 1e-3 else (1e6, "µs")


def moved(value: float) -> str:
    """Bytes that were moved, in powers of 1000 as rates are: '19.5 GB'."""
    for suffix in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} B" if suffix == "B" else f"{value:.3g} {suffix}"
        value /= 1000
    return f"{value:.3g} TB" if value < 1000 else f"{value:,.0f} TB"


def memory(value: float) -> str:
    """Bytes of memory, in powers of 1024."""
    return format_bytes(value)


def rate(value: float) -> str:
    """Bytes per second as disks are sold: '2.31 GB/s', '45 MB/s'."""
    return f"{value / 1e9:.2f} GB/s" if value >= 0.0995e9 else f"{value / 1e6:.3g} MB/s"


def parameters(value: float) -> str:
    """A number of parameters: '10.8 M parameters'."""
    return f"{_scaled(value)} parameters"


def parameter_rate(value: float) -> str:
    """Parameters updated per second: '0.85 G parameters/s'."""
    return f"{_scaled(value)} parameters/s"


def _scaled(value: float) -> str:
    for suffix in ("", " k", " M", " G"):
        if value < 999.5:
            return f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g} T"


def tokens(value: float) -> str:
    """A number of tokens or tokens per second."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def percent(share: float) -> str:
    """'92%'; below 10% with one decimal, so that little is not nothing."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share * 100:.0f}%" if share >= 0.0995 or share == 0 else f"{share * 100:.1f}%"


def general(value: float) -> str:
    """Three digits, or a whole number of up to a million."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
