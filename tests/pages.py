"""Pages of the documentation: their files, commands and quoted output."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_FENCE = re.compile(r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        language: as the page says, ``text`` for what a program printed.
        title: name of the file that it shows, or "".
        body: what is in it.
    """

    language: str
    title: str
    body: str

    @property
    def commands(self) -> list[str]:
        """Its lines as commands, without comments."""
        return [command for line in self.body.splitlines() if (command := line.partition(" #")[0].strip())]


def blocks(page: str) -> list[Block]:
    """The blocks of a page in ``docs``, from top to bottom."""
    found = _FENCE.findall((DOCS / page).read_text(encoding="utf-8"))
    return [Block(language=language, title=title, body=body) for language, title, body in found]


def quoted(page: str) -> list[str]:
    """The lines that a page says are printed."""
    lines = [line for block in blocks(page) if block.language == "text" for line in block.body.splitlines()]
    assert lines, page
    return lines


def unmeasured(text: str) -> str:
    """``text`` without what differs from machine to machine: numbers, sizes, checksums, and how wide a screen is."""
    text = re.sub(r"\b[0-9a-f]{8}\b", "#", text)
    text = re.sub(r"\d[\d,.]*( [KMGT]?i?B\b| [µnm]?s\b)?", "#", text)
    return re.sub(r"\s+", " ", text)


def not_printed(page: str, printed: str) -> list[str]:
    """What a page quotes and no program printed."""
    found = unmeasured(printed)
    return [line for line in quoted(page) if unmeasured(line).strip() not in found]
