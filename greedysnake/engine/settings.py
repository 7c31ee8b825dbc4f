"""How a trainer trains, as data: kept with every snapshot, so that a run resumes from its storage alone."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from greedysnake.engine.arguments import check_arguments
from greedysnake.errors import ConfigError
from greedysnake.models.layout import DEFAULT_CHUNK_ELEMENTS
from greedysnake.optim import AdamW, LearningRate, LossScaling
from greedysnake.plan.placement import PlanRequest
from greedysnake.schedule import Tier
from greedysnake.units import parse_bytes

DEFAULT_SNAPSHOT_STEPS = 20
"""Steps between snapshots where something stays in host memory, so that a snapshot has a cost."""

LAYOUT = ("dtype", "layers_per_unit", "chunk_elements", "seed", "second_slot")
"""What decides the bytes in a store and the numbers in them: it cannot change when a run is resumed."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Everything a trainer is made with, besides the model.

    Attributes:
        storage: the folders of weights and state, in order.
        optimizer: AdamW's settings.
        learning_rate: by step; None keeps the optimizer's.
        dtype: ``"bfloat16"`` or ``"float16"`` (both with float32 master weights), or ``"float32"``.
        device: ``"auto"`` and ``"cpu"`` compute on the CPU, ``"cuda"`` on a GPU, ``"emulated"`` on the CPU as if it
            were a device with memory of its own, for tests.
        host_memory: bytes that the process may use, or text like ``"16GiB"``; None: what is free, less a tenth.
        device_memory: likewise of the device's own memory; None: what is free, less a tenth.
        delayed_share: α, the part of each unit's update that runs in the next step; None: planned.
        schedule: ``"vertical"``, or ``"horizontal"``, the baseline.
        seed: of random weights and dropout.
        layers_per_unit: decoder layers loaded and computed as one.
        snake: whether every other unit takes the micro-batches in reverse.
        overlap: whether operations of different resources run at the same time; False is for comparison.
        boundaries_on_device, boundaries_on_ssd: shares of the boundaries that wait for the backward there, the rest in
            host memory; None: planned.
        gradients: ``"host"``, ``"ssd"``, or None: planned.
        resident_weights, resident_state: share of all weights and of all optimizer state that stays in host memory,
            and is written to SSD only for a snapshot; None: as much as fits.
        snapshot_every: steps between snapshots; None: 1 if nothing is resident, else 20. The snapshot of a step is
            taken in the forward of the next one, when its delayed updates have been made.
        second_slot: whether the storage has two places for everything, so that a run that is killed can be resumed;
            without, it takes half the disk, and only a run that was closed can.
        chunk_elements: most parameters updated as one, a multiple of 4096.
        max_skipped_steps: steps in a row that may be skipped because they are not finite; in float16, steps that
            only lower the loss scale are not counted.
        loss_scaling: how float16's loss scale changes; None: as in ``torch.amp.GradScaler``. Not used otherwise.
        trust_remote_code: whether Python code in the model folder may be run, for a model that transformers does not
            know.

    Raises:
        ConfigError: listing everything that makes no sense.
    """

    storage: tuple[Path, ...]
    optimizer: AdamW = field(default_factory=AdamW)
    learning_rate: LearningRate | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    host_memory: int | str | None = None
    device_memory: int | str | None = None
    delayed_share: float | None = None
    schedule: str = "vertical"
    seed: int = 0
    layers_per_unit: int = 1
    snake: bool = True
    overlap: bool = True
    boundaries_on_device: float | None = None
    boundaries_on_ssd: float | None = None
    gradients: str | None = None
    resident_weights: float | None = 0.0
    resident_state: float | None = 0.0
    snapshot_every: int | None = None
    second_slot: bool = True
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS
    max_skipped_steps: int = 10
    loss_scaling: LossScaling | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_arguments(
            storage=self.storage,
            dtype=self.dtype,
            device=self.device,
            schedule=self.schedule,
            gradients=self.gradients,
            shares={name: getattr(self, name) for name in _SHARES},
            counts={"layers_per_unit": self.layers_per_unit, "snapshot_every": self.snapshot_every},
            sizes={"host_memory": self.host_memory, "device_memory": self.device_memory},
        )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Settings by name.

        Raises:
            ConfigError: a name is unknown, or as for the class itself.
        """
        if problems := cls._unknown(values):
            raise ConfigError("\n".join(problems))
        return cls(**values)

    @classmethod
    def _unknown(cls, values: Iterable[str]) -> list[str]:
        known = {one.name for one in fields(cls)}
        return [f"{name} is not a setting of a trainer" for name in values if name not in known]

    @property
    def rate(self) -> LearningRate:
        """The learning rate by step."""
        return self.learning_rate or LearningRate(peak=self.optimizer.lr)

    @property
    def nothing_resident(self) -> bool:
        """Whether all weights and state go through SSD."""
        return self.resident_weights == 0 and self.resident_state == 0

    @property
    def steps_between_snapshots(self) -> int:
        """As asked for; else 1 where a snapshot costs next to nothing."""
        return self.snapshot_every or (1 if self.nothing_resident else DEFAULT_SNAPSHOT_STEPS)

    @property
    def device_limit(self) -> int | None:
        """Bytes of device memory that may be used, None for all."""
        return None if self.device_memory is None else parse_bytes(self.device_memory)

    def request(self, *, separate_device: bool, device_free_bytes: int | None) -> PlanRequest:
        """What the plan is asked for.

        Args:
            separate_device: whether the device has memory of its own.
            device_free_bytes: of it, within the limit; None where it cannot be told.
        """
        return PlanRequest(
            schedule=self.schedule,
            delayed_share=self.delayed_share,
            snake=self.snake,
            overlap=self.overlap,
            boundaries_on_device=self.boundaries_on_device,
            boundaries_on_ssd=self.boundaries_on_ssd,
            gradients=None if self.gradients is None else Tier(self.gradients),
            host_memory=None if self.host_memory is None else parse_bytes(self.host_memory),
            separate_device=separate_device,
            device_memory=self.device_limit if device_free_bytes is None else device_free_bytes,
            clipping=self.optimizer.max_grad_norm is not None,
            can_take_back=self.second_slot and self.steps_between_snapshots == 1 and self.nothing_resident,
            resident_weights=self.resident_weights,
            resident_state=self.resident_state,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` takes them back."""
        return {**asdict(self), "storage": [str(folder) for folder in self.storage]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Settings from what :meth:`as_json` gave."""
        optimizer, rate, scaling = values["optimizer"], values["learning_rate"], values["loss_scaling"]
        typed = {
            "storage": tuple(map(Path, values["storage"])),
            "optimizer": AdamW(**{**optimizer, "betas": tuple(optimizer["betas"])}),
            "learning_rate": None if rate is None else LearningRate(**rate),
            "loss_scaling": None if scaling is None else LossScaling(**scaling),
        }
        return cls(**{**values, **typed})

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """These settings with changes, for a run that is resumed.

        Raises:
            ConfigError: a change is not a setting, or is one that the store's content depends on.
        """
        problems = self._unknown(changes)
        problems += [
            f"{name} was {getattr(self, name)!r} when the run began, so it cannot be {changes[name]!r} now"
            for name in LAYOUT
            if name in changes and changes[name] != getattr(self, name)
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        return replace(self, **changes)


_SHARES = ("delayed_share", "resident_weights", "resident_state", "boundaries_on_device", "boundaries_on_ssd")
