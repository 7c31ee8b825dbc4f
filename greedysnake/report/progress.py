"""The state of a run in words, as one line of a given width or as a plain line for a log."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from greedysnake.report.events import resource_words
from greedysnake.units import format_bytes

_NARROWEST_BAR, _WIDEST_BAR = 6, 40  # columns


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a run after a step; None is not known."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float | None
    eta_s: float | None
    bottleneck: str | None
    read_rate: float | None
    """Bytes per second."""
    write_rate: float | None
    """Bytes per second."""
    host_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class _Field:
    """One thing to tell: the same from its longest wording to its shortest, and its colour."""

    wordings: Sequence[str]
    style: str


def progress_line(progress: Progress, width: int, *, waited_s: float = 0.0, ascii_only: bool = False) -> Text:
    """A progress bar and all that is known, worded as fully as ``width`` columns allow.

    Args:
        progress: the state after the last step.
        width: columns that the line may take; below about 75, the less important things are left out.
        waited_s: seconds since that state; the time left is shortened by them.
        ascii_only: draw the bar and the separators without Unicode.
    """
    fields = _fields(progress, waited_s, ascii_only)
    separator = " | " if ascii_only else " · "
    level = dict.fromkeys(fields, 0)
    bar_width = _NARROWEST_BAR
    for name in (None, *_shortening_order(fields)):
        if name == "separator":
            separator = " "
        elif name == "bar":
            bar_width = 0
        elif name is not None:
            level[name] += 1
        words = {name: field.wordings[level[name]] for name, field in fields.items()}
        used = _width_of([text for text in words.values() if text], separator)
        if used + (bar_width + 1 if bar_width else 0) <= width:
            break
    line = Text(no_wrap=True, overflow="crop", end="")
    if bar_width:
        bar_width = min(_WIDEST_BAR, width - used - 1)
        line.append_text(_bar(progress, bar_width, ascii_only)).append(" ")
    shown = [(text, fields[name].style) for name, text in words.items() if text]
    for index, (text, style) in enumerate(shown):
        line.append(separator if index else "", style="dim").append(text, style=style)
    line.truncate(max(width, 1))
    return line


def plain_line(progress: Progress) -> str:
    """All that is known in one line of plain ASCII, for a log."""
    return ", ".join(field.wordings[0] for field in _fields(progress, 0.0, ascii_only=True).values())


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: '0:42', '12:05', '3:07:09'; from 100 hours on '4d 05h'."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours >= 100:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _fields(progress: Progress, waited_s: float, ascii_only: bool) -> dict[str, _Field]:
    """What to tell, from left to right. The last wording of what may be left out is empty."""
    count = f"{progress.step}/{progress.steps}"
    fields = {
        "step": _Field(wordings=(f"step {count}", count), style="bold"),
        "loss": _Field(wordings=(f"loss {_loss(progress.loss)}",), style="bold cyan"),
    }
    if progress.tokens_per_second is not None:
        rate = progress.tokens_per_second
        number = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
        short = f"{rate / 1000:.0f}k" if rate >= 99_500 else number.replace(",", "")
        fields["speed"] = _Field(wordings=(f"{number} tokens/s", f"{short} tok/s", ""), style="green")
    ssd = _ssd_wordings(progress.read_rate, progress.write_rate)
    if ssd:
        fields["ssd"] = _Field(wordings=(*ssd, ""), style="magenta")
    if progress.host_bytes is not None:
        size = format_bytes(progress.host_bytes)
        short = size.replace(" ", "").replace("iB", "")
        fields["memory"] = _Field(wordings=(f"host memory {size}", f"host {size}", short, ""), style="blue")
    if progress.bottleneck is not None:
        name = resource_words(progress.bottleneck)
        name = name.replace("→", "to") if ascii_only else name
        short = progress.bottleneck.replace("_", " ")
        fields["bottleneck"] = _Field(wordings=(f"limited by {name}", f"by {short}", ""), style="yellow")
    if progress.eta_s is not None:
        left = format_duration(progress.eta_s - waited_s)
        fields["eta"] = _Field(wordings=(f"ETA {left}", left, ""), style="bold")
    return fields


def _shortening_order(fields: dict[str, _Field]) -> list[str]:
    """What to shorten first, second, ...: each entry makes one field one wording shorter."""
    shorten = "memory ssd speed step separator bottleneck ssd ssd memory"
    leave_out = "eta bar memory ssd ssd ssd bottleneck bottleneck speed speed eta eta"
    left = {name: len(field.wordings) - 1 for name, field in fields.items()} | {"separator": 1, "bar": 1}
    order = []
    for name in f"{shorten} {leave_out}".split():
        if left.get(name, 0) > 0:
            left[name] -= 1
            order.append(name)
    return order


def _ssd_wordings(read_rate: float | None, write_rate: float | None) -> list[str]:
    """SSD rates in one unit of powers of 1000, as disks are sold; empty if neither is known."""
    known = [rate for rate in (read_rate, write_rate) if rate is not None]
    if not known:
        return []
    unit, scale, most_digits = ("GB/s", 1e9, 2) if max(known) >= 0.0995e9 else ("MB/s", 1e6, int(max(known) < 10e6))
    rates = (("read", read_rate), ("write", write_rate))

    def worded(digits: int, name_length: int | None, space: str) -> str:
        digits = min(digits, most_digits)
        parts = (f"{name[:name_length]}{space}{rate / scale:.{digits}f}" for name, rate in rates if rate is not None)
        return f"{' '.join(parts)} {unit}"

    return [f"SSD {worded(2, None, ' ')}", f"SSD {worded(2, 1, '')}", worded(2, 1, ""), worded(1, 1, "")]


def _loss(loss: float) -> str:
    return f"{loss:.3f}" if abs(loss) < 1000 else f"{loss:.3g}"


def _width_of(texts: Sequence[str], separator: str) -> int:
    return sum(map(cell_len, texts)) + len(separator) * max(0, len(texts) - 1)


def _bar(progress: Progress, width: int, ascii_only: bool) -> Text:
    share = min(1.0, progress.step / progress.steps) if progress.steps > 0 else 0.0
    done = int(share * width)
    full, empty = ("#", "-") if ascii_only else ("━", "━")
    return Text(full * done, style="green").append(empty * (width - done), style="bright_black")
