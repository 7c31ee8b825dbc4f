"""Why no plan fits: which limit fails, by how much, and what would help."""

from collections.abc import Iterable
from dataclasses import replace

from greedysnake.errors import ConfigError, GreedySnakeError, MemoryBudgetError, StorageError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.query import Case, PlanQuery, over
from greedysnake.plan.slots import NARROW, with_slots
from greedysnake.schedule import Choices, Tier
from greedysnake.units import format_bytes

_NAMES = {Tier.HOST: "host memory", Tier.DEVICE: "device memory", Tier.SSD: "disk"}


def nothing_fits(query: PlanQuery, batches: Iterable[BatchShape]) -> GreedySnakeError:
    """The error for a query without a plan, told by the least demanding one.

    Args:
        query: what was asked.
        batches: that were tried.
    """
    batch = min(batches, key=lambda batch: (batch.rows, batch.micro_batches), default=None)
    if batch is None:
        count = f"{query.micro_batches} " if query.micro_batches else ""
        each = f" of {query.rows}" if query.rows else ""
        return ConfigError(
            f"{query.sequences} sequences a step do not divide into {count}micro-batches{each}; leave one of these to "
            f"the plan"
        )
    case = _least(query, batch)
    needs = case.needs(query)
    short = over(needs, query.limits)
    if not short:
        return MemoryBudgetError(
            f"{query.workload.name} fits on {query.hardware.name} in parts, but with what is given no division between "
            f"memory and disk does. Leave more choices to the plan, or give it more of either"
        )
    lines = []
    for tier, missing in short.items():
        purposes = needs.purposes(tier)
        largest = sorted(purposes, key=lambda name: purposes[name], reverse=True)[:3]
        parts = ", ".join(f"{name} {format_bytes(purposes[name])}" for name in largest)
        total = needs.total(tier)
        lines.append(
            f"{_NAMES[tier]}: needs at least {format_bytes(total)}, may use {format_bytes(total - missing)}, "
            f"{format_bytes(missing)} short (most of it: {parts}). {_remedy(query, tier, batch)}"
        )
    kind = StorageError if set(short) == {Tier.SSD} else MemoryBudgetError
    return kind("\n  ".join([f"{query.workload.name} does not fit on {query.hardware.name}", *lines]))


def _least(query: PlanQuery, batch: BatchShape) -> Case:
    """The case that takes the least memory; of those, one that takes the least disk if memory allows."""
    alpha = query.delayed_share if query.delayed_share is not None else 0.0
    choices = Choices(
        delayed_share=alpha,
        wait_for_norm=query.waits_for_norm(alpha),
        separate_device=query.hardware.separate_device,
        boundaries_on_ssd=1.0 if query.boundaries_on_ssd is None else query.boundaries_on_ssd,
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
    if tier == Tier.SSD:
        return "What would help: more disk, or a smaller model"
    smaller = [f"sequences shorter than {batch.tokens} tokens"]
    if batch.rows > 1:
        smaller.append(f"fewer than {batch.rows} sequences a micro-batch")
    if batch.micro_batches > 1:
        smaller.append(f"fewer than {batch.micro_batches} micro-batches")
    if (query.layers_per_unit or 1) > 1:
        smaller.append("one layer a unit")
    return f"What would help: more {tier} memory, or {', '.join(smaller)}"
