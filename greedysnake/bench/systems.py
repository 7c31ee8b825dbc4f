"""The systems that are compared: which module runs each, and with what settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from greedysnake.errors import ConfigError

ALL_RESIDENT: dict[str, Any] = {"resident_weights": None, "resident_state": None}
"""As much as fits stays in host memory."""
STREAMED: dict[str, Any] = {"resident_weights": 0.0, "resident_state": 0.0}
"""All weights and state go through the disk in every step."""
ONE_GROUP: dict[str, Any] = {"group_size": 1_000_000}
"""All micro-batches of a step go through a layer together, however many there are."""
NEVER = 1e9
"""A norm that no gradient reaches: updates wait for it, and nothing is ever scaled."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One system, or one variant of it.

    Attributes:
        name: as a person gives it.
        module: run as ``python -m``, with the cell as JSON.
        settings: of that module.
        changes: of what all systems share (``max_grad_norm``).
        own_environment: whether it runs in the virtual environment that ``--zero-infinity`` names.
        swap: whether it may use the machine's swap.
        plans: whether it can be given the machine's figures to plan with.
        order: the planner's word for its schedule, to estimate its time.
    """

    name: str
    module: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    own_environment: bool = False
    swap: bool = False
    plans: bool = False
    order: str = "vertical"


def _ours(name: str, settings: Mapping[str, Any], **more: Any) -> System:
    return System(name=name, module="greedysnake.bench.run_greedysnake", settings=settings, plans=True, **more)


def _zero_infinity(name: str, **settings: Any) -> System:
    module = "greedysnake.bench.run_zero_infinity"
    return System(name=name, module=module, settings=settings, own_environment=True, order="zero-infinity")


_TORCH = "greedysnake.bench.run_torch"
_LEAST_MEMORY: dict[str, Any] = {
    "pipeline": False,
    "optimizer_buffers": 5,
    "prefetch_elements": 0,
    "group_elements": 1_000_000,
}
"""ZeRO-Infinity with as little memory as it can do with, for the smallest limit in which it trains."""

LENT = "-float32-products"
"""Ends the name of another system that is lent GreedySnake's products of 16-bit matrices by way of float32."""

SYSTEMS = {
    system.name: system
    for system in (
        _ours("greedysnake", ALL_RESIDENT),
        _ours("greedysnake-streamed", STREAMED),
        _ours("horizontal", {**ALL_RESIDENT, "schedule": "horizontal"}, order="horizontal"),
        _zero_infinity("zero-infinity"),
        _zero_infinity("zero-infinity-weights-in-memory", parameters="cpu"),
        _zero_infinity("zero-infinity-activations-in-memory", checkpointing=False),
        _zero_infinity("zero-infinity-in-memory", parameters="cpu", checkpointing=False),
        _zero_infinity("zero-infinity-least-memory", **_LEAST_MEMORY),
        _zero_infinity("zero-offload", parameters="cpu", optimizer="cpu"),
        _zero_infinity("zero-offload-activations-in-memory", parameters="cpu", optimizer="cpu", checkpointing=False),
        System(name="torch", module=_TORCH, order="torch"),
        System(name="torch-activations-in-memory", module=_TORCH, settings={"checkpointing": False}, order="torch"),
        System(name="torch-swap", module=_TORCH, swap=True, order="torch"),
    )
}
DEFAULT_SYSTEMS = ("greedysnake", "greedysnake-streamed", "horizontal", "zero-infinity", "torch")


def ablations(base: str, *, clipping: bool) -> list[System]:
    """The base and variants of it in which one thing is switched off.

    Args:
        base: ``greedysnake`` or ``greedysnake-streamed``.
        clipping: whether updates wait for the norm of the gradient anyway.

    Raises:
        ConfigError: the base is another.
    """
    if base not in ("greedysnake", "greedysnake-streamed"):
        raise ConfigError(f"base of the ablations: found {base!r}; needs greedysnake or greedysnake-streamed")
    start = SYSTEMS[base]
    resident = base == "greedysnake"

    def without(what: str, settings: Mapping[str, Any], **more: Any) -> System:
        return _ours(f"{'' if resident else 'streamed, '}without {what}", {**start.settings, **settings}, **more)

    found = [start, without("the vertical order", {"schedule": "horizontal"}, order="horizontal")]
    found.append(without("groups of micro-batches", ONE_GROUP))
    if clipping or resident:
        # updates are held back till the norm is known, so those that are not delayed follow the backward
        found.append(without("optimizer overlap (α = 0)", {"delayed_share": 0.0}))
    else:
        found.append(without("delayed updates (α = 0)", {"delayed_share": 0.0}))
        waiting = {"max_grad_norm": NEVER}
        found.append(without("optimizer overlap", {"delayed_share": 0.0}, changes=waiting))
    found.append(without("any overlap", {"overlap": False}))
    found.append(without("kept activations", {"kept_activations": 0.0}))
    if resident:
        found.append(without("resident weights", {"resident_weights": 0.0}))
        found.append(without("resident state", {"resident_state": 0.0}))
        found.append(without("anything resident", STREAMED))
    found.append(without("the split master", {"split_master": False}))
    return found


def find_systems(names: list[str]) -> list[System]:
    """Systems by name, others than GreedySnake's own also with LENT behind it.

    Raises:
        ConfigError: naming those that are unknown.
    """
    lent = {f"{name}{LENT}": _lent(system) for name, system in SYSTEMS.items() if not system.plans}
    known = {**SYSTEMS, **lent}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"--system: found {', '.join(unknown)}; known are {', '.join(SYSTEMS)}, and those of PyTorch and DeepSpeed "
            f"with {LENT} behind the name"
        )
    return [known[name] for name in names]


def _lent(system: System) -> System:
    return replace(system, name=f"{system.name}{LENT}", settings={**system.settings, "products": "float32"})
