"""Memory and disk that a planned step takes, by purpose."""

from dataclasses import dataclass

from greedysnake.plan.workload import Workload
from greedysnake.schedule import Choices, StepShape, Tier, step_pools

PROCESS_BYTES = 2**30
"""The process itself: interpreter, torch, threads. Measured between 0.6 and 1 GiB."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes by purpose.

    Attributes:
        host, device: of memory.
        disk: of all storage folders together, with the second slot of what is committed.
    """

    host: dict[str, int]
    device: dict[str, int]
    disk: dict[str, int]

    def purposes(self, tier: Tier) -> dict[str, int]:
        """Bytes in a tier by purpose."""
        return {Tier.HOST: self.host, Tier.DEVICE: self.device, Tier.SSD: self.disk}[tier]

    def total(self, tier: Tier) -> int:
        """All bytes in a tier."""
        return sum(self.purposes(tier).values())


def step_needs(
    workload: Workload,
    shape: StepShape,
    choices: Choices,
    *,
    computing: int,
    schedule: str = "vertical",
    slots: int = 2,
    process: int = PROCESS_BYTES,
) -> Needs:
    """What a step takes.

    Args:
        workload: the model.
        shape: what its schedule is built from; its chunks may be bundles, their buffers count as single chunks.
        choices: of the plan.
        computing: bytes that torch needs besides the schedule's buffers (:meth:`Workload.computing_bytes`).
        schedule: name of the schedule.
        slots: places on the disks for what is committed; 2 keeps the last commit whole.
        process: bytes of the process itself.
    """
    pools = step_pools(schedule, shape, choices)
    chunk = workload.largest_chunk
    single = {"state": chunk.state_bytes, "gradient_chunk": chunk.gradient_bytes}
    host = {"process": process, "master weights": chunk.gradient_bytes}
    device: dict[str, int] = {}
    disk: dict[str, int] = {}
    (device if choices.separate_device else host)["computation"] = computing
    for name, pool in pools.items():
        size = single[name] * len(pool.slot_bytes) if name in single else pool.bytes
        if not size:
            continue
        where = {Tier.HOST: host, Tier.DEVICE: device, Tier.SSD: disk}[pool.tier]
        where[name.replace("_", " ")] = slots * size if name in ("ssd_weights", "ssd_state") else size
    return Needs(host=host, device=device, disk=disk)
