"""Memory over the time of a step: how much of each tier holds something when, and for what.

A schedule knows which operations a buffer's content lives through, the events of a step when each of them
began and ended. The content is there from the start of the operation that writes it until all that use it
have ended, and takes the whole slot of its pool.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from greedysnake.report.events import OperationEvent
from greedysnake.schedule import Schedule, Tier, content_lives

GROUPS = ("resident", "waiting gradients", "boundaries", "kept", "weights", "gradients", "state", "other")
"""What memory is for, in the order in which pictures stack it: what changes little comes first."""

TIER_WORDS = {Tier.DEVICE: "device memory", Tier.HOST: "host memory", Tier.SSD: "SSD scratch space"}
"""How a person reads a tier; weights and state at their place on SSD are in none."""

_POOL_GROUPS = {
    "weights": "weights",
    "device_weights": "weights",
    "gradient": "gradients",
    "device_gradient": "gradients",
    "gradient_chunk": "gradients",
    "tied_gradient": "gradients",
    "norm": "gradients",
    "held": "waiting gradients",
    "state": "state",
    "activation": "boundaries",
    "boundary": "boundaries",
    "boundary_gradient": "boundaries",
    "ssd_boundary": "boundaries",
    "kept_activation": "kept",
    "resident_weights": "resident",
    "resident_state": "resident",
}
_DURABLE_POOLS = frozenset({"ssd_weights", "ssd_state", "ssd_frozen"})

_BY_PURPOSE = " by purpose"
_LIVE, _FREE = "live", "free"


@dataclass(frozen=True, kw_only=True)
class TierMemory:
    """What one tier holds over the time of a step.

    Attributes:
        tier: which one.
        reserved_bytes: of its pools, whatever is live.
        times_s: seconds, rising: the start of the step, every change, and its end.
        live_bytes: bytes from each time to the next by group, for every group that has reserved any, in the order of
            ``GROUPS``.
    """

    tier: Tier
    reserved_bytes: int
    times_s: tuple[float, ...]
    live_bytes: Mapping[str, tuple[int, ...]]

    def total_bytes(self) -> list[int]:
        """Live bytes of all groups together, from each time to the next."""
        return [sum(values) for values in zip(*self.live_bytes.values(), strict=True)] or [0] * len(self.times_s)


def pool_group(pool: str) -> str | None:
    """What a pool of the schedules is for, one of ``GROUPS``; None if no schedule has such a pool."""
    return _POOL_GROUPS.get(pool)


def step_memory(schedule: Schedule, events: Iterable[OperationEvent]) -> list[TierMemory]:
    """The live bytes of every tier in which ``schedule`` reserves anything.

    Args:
        schedule: the step's.
        events: what was recorded of it, on any clock. Of a step that was cut short, what is not there never began;
            content that it left behind stays to the end.
    """
    spans = {event.operation: (event.start_s, event.end_s) for event in events if event.operation is not None}
    if not spans:
        return []
    first, last = min(start for start, _ in spans.values()), max(end for _, end in spans.values())
    changes: dict[Tier, dict[float, dict[str, int]]] = defaultdict(lambda: {first: {}, last: {}})
    for life in content_lives(schedule):
        pool = schedule.pools[life.buffer.pool]
        size = pool.slot_bytes[life.buffer.slot]
        if life.buffer.pool in _DURABLE_POOLS or not size or not (life.writer is None or life.writer in spans):
            continue
        over = life.released and all(index in spans for index in life.uses)
        group = _POOL_GROUPS.get(life.buffer.pool, "other")
        ends = [(max((spans[index][1] for index in life.uses), default=first), -size)] if over else []
        for time, change in [(first if life.writer is None else spans[life.writer][0], size), *ends]:
            at = changes[pool.tier].setdefault(time, {})
            at[group] = at.get(group, 0) + change
    reserved: dict[Tier, Counter[str]] = defaultdict(Counter)
    for name, pool in schedule.pools.items():
        if name not in _DURABLE_POOLS and pool.bytes:
            reserved[pool.tier][_POOL_GROUPS.get(name, "other")] += pool.bytes
    return [_summed(tier, reserved[tier], changes[tier]) for tier in Tier if tier in reserved]


def _summed(tier: Tier, reserved: Counter[str], changes: Mapping[float, Mapping[str, int]]) -> TierMemory:
    """The memory of a tier from what is reserved by group and what changes when."""
    times = sorted(changes)
    live = {
        group: tuple(accumulate(changes[time].get(group, 0) for time in times)) for group in GROUPS if group in reserved
    }
    return TierMemory(
        tier=tier,
        reserved_bytes=reserved.total(),
        times_s=tuple(times),
        live_bytes=live,
    )


def counter_samples(tiers: Iterable[TierMemory]) -> list[tuple[float, str, dict[str, int]]]:
    """Samples of a trace's counters: when (seconds), which counter, and its values.

    Each tier has a counter of what is live and what is reserved beside it, and one by purpose.
    """
    samples = []
    for memory in tiers:
        words = TIER_WORDS[memory.tier]
        for index, (time, live) in enumerate(zip(memory.times_s, memory.total_bytes(), strict=True)):
            samples.append((time, words, {_LIVE: live, _FREE: memory.reserved_bytes - live}))
            by_purpose = {group: values[index] for group, values in memory.live_bytes.items()}
            samples.append((time, words + _BY_PURPOSE, by_purpose))
    return samples


def memory_of_samples(samples: Sequence[tuple[float, str, Mapping[str, Any]]]) -> list[TierMemory]:
    """The inverse of :func:`counter_samples`; counters of other names are left out.

    Raises:
        ValueError, TypeError, KeyError: they are damaged.
    """
    found = []
    for tier, words in TIER_WORDS.items():
        totals = {time: values for time, name, values in samples if name == words}
        by_purpose = {time: values for time, name, values in samples if name == words + _BY_PURPOSE}
        if not totals:
            continue
        times = sorted(totals)
        reserved = {int(values[_LIVE]) + int(values[_FREE]) for values in totals.values()}
        groups = [group for group in GROUPS if any(group in values for values in by_purpose.values())]
        live = {group: tuple(int(by_purpose[time][group]) for time in times) for group in groups}
        sizes = [*reserved, *(size for values in live.values() for size in values)]
        if not all(map(math.isfinite, times)) or min(sizes) < 0 or max(sizes) > 2**62:
            raise ValueError("counters that cannot have been measured")
        found.append(
            TierMemory(tier=tier, reserved_bytes=max(reserved), times_s=tuple(times), live_bytes=live),
        )
    return found
