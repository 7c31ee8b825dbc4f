"""One thing that is wrong with a config, as a line of text."""

import reprlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What is wrong with one setting.

    Attributes:
        key: Dotted key of the setting, such as ``optimizer.lr``.
        text: The value found and what is needed, without line breaks.
    """

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def shown(value: object) -> str:
    """``value`` as a short, printable piece of one line, however large, deep or circular it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    short.maxlevel, short.maxdict, short.maxlist = 2, 4, 4
    try:
        return short.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number too long to print"


def dotted(section: str, key: object) -> str:
    """The dotted name of ``key`` in ``section`` ("" is the top level), printable whatever the key is."""
    readable = isinstance(key, str) and 0 < len(key) <= 60 and key.isprintable()
    name = str(key) if readable else shown(key)
    return f"{section}.{name}" if section else name
