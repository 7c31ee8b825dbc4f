"""System calls that fail as they are told to, and remember that they were made."""

import os
import threading
from collections.abc import Callable
from typing import Any

from greedysnake.storage import System

CALLS = [name for name in vars(System) if not name.startswith("_")]

Fault = Callable[..., Any]
"""Answers in place of a call: given the real one and its arguments."""


def fails(code: int) -> Fault:
    """The error of this number."""

    def fault(real: Callable[..., Any], *_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fault


def failing(code: int) -> Callable[..., None]:
    """The error of this number, in place of a function of a module."""

    def call(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


class FaultySystem(System):
    """The real system calls, some answered by a fault.

    Attributes:
        made: name and path of every call, in order.
    """

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []
        self._faults: list[tuple[str, Callable[[str], bool], Fault, list[int]]] = []
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def strike(self, name: str, fault: Fault, where: str = "", *, after: int = 0, times: int = 10**9) -> None:
        """From now on let a fault answer calls of ``name`` upon paths with ``where`` in them.

        Args:
            name: of a method of System.
            fault: what answers.
            where: part of the path.
            after: so many such calls succeed first.
            times: so many are struck.
        """
        self._faults.append((name, lambda path: where in path, fault, [after, times]))

    def heal(self) -> None:
        """Let all calls through again."""
        self._faults = []

    def count(self, name: str, where: str = "") -> int:
        """How often a call was made."""
        return sum(1 for made, path in self.made if made == name and where in path)

    def answer(self, name: str, *args: Any) -> Any:
        """One call."""
        real = getattr(System, name)
        path = self._paths.get(args[0], "") if isinstance(args[0], int) else str(args[0])
        chosen = None
        with self._lock:
            self.made.append((name, path))
            for called, applies, fault, left in self._faults:
                if called == name and applies(path):
                    if left[0] > 0:
                        left[0] -= 1
                    elif left[1] > 0:
                        left[1] -= 1
                        chosen = fault
                        break
        result = chosen(lambda *given: real(self, *given), *args) if chosen else real(self, *args)
        if name == "open":
            self._paths[result] = path
        return result


def _answered(name: str) -> Callable[..., Any]:
    def call(self: FaultySystem, *args: Any) -> Any:
        return self.answer(name, *args)

    return call


for _name in CALLS:
    setattr(FaultySystem, _name, _answered(_name))
