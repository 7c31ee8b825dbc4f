"""Why no plan fits: which limit fails, by how much, and what would help."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from greedysnake.errors import ConfigError, GreedySnakeError, MemoryBudgetError, StorageError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.query import Case, PlanQuery, group_sizes, over
from greedysnake.plan.slots import NARROW, with_slots
from greedysnake.schedule import Choices, Tier
from greedysnake.units import format_bytes

_SHORTEST = 128
"""Tokens of the shortest sequences that are proposed, and the steps in which longer ones are."""
_NAMES = {Tier.HOST: "host memory", Tier.DEVICE: "device memory", Tier.SSD: "disk"}


def nothing_fits(query: PlanQuery, batches: Iterable[BatchShape]) -> GreedySnakeError:
    """The error for a query without a plan, told by the least demanding one, which does not fit.

    Args:
        query: what was asked.
        batches: that were tried.
    """
    case = least_case(query, batches)
    if case is None:
        count = f"{query.micro_batches} " if query.micro_batches else ""
        each = f" of {query.rows}" if query.rows else ""
        return ConfigError(
            f"{query.sequences} sequences a step do not divide into {count}micro-batches{each}; leave one of these to "
            f"the plan"
        )
    needs = case.needs(query)
    short = over(needs, query.limits)
    lines = []
    for tier, missing in short.items():
        purposes = needs.purposes(tier)
        largest = sorted(purposes, key=lambda name: purposes[name], reverse=True)[:3]
        parts = ", ".join(f"{name} {format_bytes(purposes[name])}" for name in largest)
        total = needs.total(tier)
        lines.append(
            f"{_NAMES[tier]}: needs at least {format_bytes(total)}, may use {format_bytes(total - missing)}, "
            f"{format_bytes(missing)} short (most of it: {parts}). {_remedy(query, tier, case.batch)}"
        )
    kind = StorageError if set(short) == {Tier.SSD} else MemoryBudgetError
    return kind("\n  ".join([f"{query.workload.name} does not fit on {query.hardware.name}", *lines]))


def least_case(query: PlanQuery, batches: Iterable[BatchShape]) -> Case | None:
    """The case that takes the least, of the smallest batch; None if there is no batch.

    Args:
        query: what was asked.
        batches: that may be.
    """
    batch = min(batches, key=lambda batch: (batch.rows, batch.micro_batches), default=None)
    return None if batch is None else _least(query, batch)


def _least(query: PlanQuery, batch: BatchShape) -> Case:
    """The case that is the least short of anything, in groups as large as that allows."""
    cases = [_least_in_groups(query, batch, size) for size in group_sizes(query, batch)]
    return min(cases, key=lambda case: _shortness(query, case))


def _least_in_groups(query: PlanQuery, batch: BatchShape, group_size: int | None) -> Case:
    """The case that takes the least memory; of those, one that takes the least disk if memory allows."""
    alpha = query.delayed_share if query.delayed_share is not None else 0.0
    on_device = query.boundaries_on_device or 0.0
    choices = Choices(
        delayed_share=alpha,
        wait_for_norm=query.waits_for_norm(alpha),
        separate_device=query.hardware.separate_device,
        group_size=group_size,
        boundaries_on_device=on_device,
        boundaries_on_ssd=1 - on_device if query.boundaries_on_ssd is None else query.boundaries_on_ssd,
        kept_activations=query.kept_activations or 0.0,
        gradients=query.gradients or Tier.SSD,
        resident_weights=query.resident_weights or 0.0,
        resident_state=query.resident_state or 0.0,
    )
    case = Case(batch=batch, layers_per_unit=query.layers_per_unit or 1, choices=with_slots(choices, NARROW))
    if Tier.SSD in over(case.needs(query), query.limits):
        in_memory = replace(
            case.choices,
            gradients=query.gradients or Tier.HOST,
            boundaries_on_ssd=query.boundaries_on_ssd or 0.0,
        )
        other = replace(case, choices=in_memory)
        return min(case, other, key=lambda one: _shortness(query, one))
    return case


def _shortness(query: PlanQuery, case: Case) -> float:
    """How much is missing, each tier's as a share of what it has."""
    limits = {Tier.HOST: query.limits.host, Tier.DEVICE: query.limits.device or 1, Tier.SSD: query.limits.disk}
    return sum(missing / limits[tier] for tier, missing in over(case.needs(query), query.limits).items())


def _remedy(query: PlanQuery, tier: Tier, batch: BatchShape) -> str:
    """What to change so that a tier has room; a smaller batch or unit only where that alone is enough."""
    if tier == Tier.SSD:
        one_slot = replace(query, second_slot=False)
        least = format_bytes(_least(one_slot, batch).needs(one_slot).total(tier))
        slot = f", engine.second_slot: false, with which it needs {least} (a killed run cannot then be resumed)"
        return f"What would help: more disk{slot if query.second_slot else ''}, or a smaller model"

    def lacks(other: _Smaller) -> bool:
        return tier in over(_least(other.query, other.batch).needs(other.query), query.limits)

    changes = [f"more {tier} memory"]
    for rising in _smaller(query, batch):
        enough = bisect_left(rising, True, key=lacks)  # what a tier must hold grows with each of them
        if enough:
            changes.append(rising[enough - 1].words)
    if len(changes) == 1:
        changes.append("a smaller model")
    return f"What would help: {', or '.join(changes)}"


@dataclass(frozen=True, kw_only=True)
class _Smaller:
    """A question about a smaller batch or unit, and in words what is smaller."""

    words: str
    query: PlanQuery
    batch: BatchShape


def _smaller(query: PlanQuery, batch: BatchShape) -> Iterator[list[_Smaller]]:
    """Ways to ask for less, each from the least that could be asked for up to just below what was."""
    yield [
        _Smaller(
            words=f"sequences of at most {tokens} tokens",
            query=replace(query, tokens=tokens),
            batch=replace(batch, tokens=tokens),
        )
        for tokens in range(_SHORTEST, batch.tokens, _SHORTEST)
    ]
    yield [
        _Smaller(words=f"a micro-batch size of at most {rows}", query=query, batch=replace(batch, rows=rows))
        for rows in range(1, batch.rows)
    ]
    yield [
        _Smaller(
            words=f"a number of micro-batches of at most {count}",
            query=query,
            batch=replace(batch, micro_batches=count),
        )
        for count in range(1, batch.micro_batches)
    ]
    yield [
        _Smaller(words=f"a group size of at most {size}", query=replace(query, group_size=size), batch=batch)
        for size in range(1, min(query.group_size or 1, batch.micro_batches))
    ]
    yield [
        _Smaller(
            words=f"a unit size of at most {layers}",
            query=replace(query, layers_per_unit=layers),
            batch=batch,
        )
        for layers in range(1, query.layers_per_unit or 1)
    ]
