"""Whether all systems learnt the same: the same model, seed and batches must give the same losses.

bfloat16 rounds differently in each system, so losses are compared within a tolerance, a step at a time. Variants of one
system share its faults, so they count as one. Where plain PyTorch has a result, it is the reference; else the median of
the systems is. Of two that disagree, both are marked.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from greedysnake.bench.cells import Cell, Measured, Setting, StepNumbers

LOSS_TOLERANCE = 0.002
"""Largest relative difference of a step's loss from the reference."""
NORM_TOLERANCE = 0.01
"""The same for the norm of the gradient, which shows a wrong gradient a step before the loss does."""
_REFERENCE = "torch"
_DEEPSPEED = ("zero-infinity", "zero-offload")


def wrong_cells(measured: Iterable[Measured]) -> dict[Cell, str]:
    """The cells whose losses or gradient norms differ from the others', with the difference in words.

    Memory and disk do not change what is learnt, so cells of one model and M are compared over all limits.
    """
    groups: dict[tuple[str, int], list[Measured]] = {}
    for one in measured:
        if one.outcome.steps:
            groups.setdefault(_what(one.cell.setting), []).append(one)
    found: dict[Cell, str] = {}
    for group in groups.values():
        for one in group:
            if difference := _difference(one.outcome.steps, _reference(group, one)):
                found[one.cell] = difference
    return found


def unchecked(measured: Sequence[Measured]) -> set[tuple[str, int]]:
    """Model and M where only one system has a result, so that there is nothing to compare it with."""
    systems: dict[tuple[str, int], set[str]] = {}
    for one in measured:
        if one.outcome.steps:
            systems.setdefault(_what(one.cell.setting), set()).add(family(one.cell.system))
    return {what for what, names in systems.items() if len(names) == 1}


def family(system: str) -> str:
    """Whose code a system is, whatever the variant: ``torch``, ``deepspeed`` or ``greedysnake``."""
    if system.startswith(_REFERENCE):
        return _REFERENCE
    return "deepspeed" if system.startswith(_DEEPSPEED) else "greedysnake"


def _what(setting: Setting) -> tuple[str, int]:
    return setting.model, setting.micro_batches


def _reference(group: Sequence[Measured], judged: Measured) -> list[dict[str, float]]:
    """Loss and norm to expect in each step of ``judged``; empty where nothing is known."""
    families: dict[str, list[Measured]] = {}
    for one in group:
        families.setdefault(family(one.cell.system), []).append(one)
    own = family(judged.cell.system)
    if own != _REFERENCE and _REFERENCE in families:
        families = {_REFERENCE: families[_REFERENCE]}
    elif own != _REFERENCE and len(families) == 2:
        del families[own]
    return [_expected(families.values(), number) for number in range(len(judged.outcome.steps))]


def _expected(families: Iterable[Sequence[Measured]], number: int) -> dict[str, float]:
    """Medians of a step's loss and norm, each family counted once."""
    expected = {}
    for field in ("loss", "grad_norm"):
        medians = []
        for ones in families:
            values = [getattr(one.outcome.steps[number], field) for one in ones if len(one.outcome.steps) > number]
            if finite := [value for value in values if value is not None and math.isfinite(value)]:
                medians.append(statistics.median(finite))
        if medians:
            expected[field] = statistics.median(medians)
    return expected


def _difference(steps: Sequence[StepNumbers], reference: Sequence[Mapping[str, float]]) -> str | None:
    for number, (step, expected) in enumerate(zip(steps, reference, strict=True), 1):
        for field, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
            words, value = f"{field.replace('_', ' ')} of step {number}", getattr(step, field)
            if value is None and field == "grad_norm":
                continue  # the system does not tell
            if value is None or not math.isfinite(value):
                return f"{words} is not finite"
            if field in expected and abs(value - expected[field]) > tolerance * abs(expected[field]):
                return f"{words} is {value:.4f}, the others' {expected[field]:.4f}: more than {tolerance:.1%} apart"
    return None
