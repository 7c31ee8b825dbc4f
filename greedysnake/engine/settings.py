"""How a trainer trains, as data: kept with every snapshot, so that a run resumes from its storage alone."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from greedysnake.engine.arguments import check_arguments
from greedysnake.engine.devices import Device, make_device
from greedysnake.errors import ConfigError
from greedysnake.models.layout import DEFAULT_CHUNK_ELEMENTS
from greedysnake.models.lora import Lora
from greedysnake.optim import AdamW, LearningRate, LossScaling
from greedysnake.plan.hardware import Hardware, load_hardware
from greedysnake.plan.request import PlanRequest
from greedysnake.plan.snapshots import can_take_back, steps_between_snapshots
from greedysnake.schedule import SHARES, Tier
from greedysnake.units import parse_bytes

LAYOUT = ("dtype", "layers_per_unit", "chunk_elements", "seed", "second_slot", "split_master", "freeze", "lora")
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
        matrix_products: how the CPU multiplies matrices of bfloat16 and float16: ``"native"``, by torch's own kernels;
            ``"float32"``, converted to float32; ``"auto"``, so where the processor has no instructions for the type.
        hardware: figures of this machine (``greedysnake probe`` writes a file of them), from which what is left open
            here is planned and a step's time predicted; a file, the name of a shipped profile, or None: a rule instead.
        delayed_share: α, the part of each unit's update that runs in the next step; None: planned.
        schedule: ``"vertical"``, or ``"horizontal"``, the baseline.
        group_size: micro-batches that go through the units together before the next ones begin; None: planned, all of
            them without the machine's figures. With ``snake``, another size rounds differently; what was planned stays
            for the whole run, also when it is resumed.
        seed: of random weights and dropout.
        layers_per_unit: decoder layers loaded and computed as one; None: planned, where the machine's figures and the
            batch are known when the trainer is made, else 1. With ``snake``, another size rounds differently.
        snake: whether every other unit takes the micro-batches in reverse.
        overlap: whether operations of different resources run at the same time; False is for comparison.
        boundaries_on_device, boundaries_on_ssd: shares of the boundaries that wait for the backward there, the rest in
            host memory; None: planned.
        kept_activations: share of the activations that are kept for the backward, as far as they fit, instead of being
            recomputed, which saves a quarter of the computation; None: planned, as many as help and fit.
        gradients: ``"host"``, ``"ssd"``, or None: planned.
        resident_weights, resident_state: share of all weights and of all optimizer state that stays in host memory,
            and is written to SSD only for a snapshot; None: planned, as much as helps and fits.
        snapshot_every: steps between snapshots; None: 1 if nothing is resident, else 20. The snapshot of a step is
            taken in the forward of the next one, when its delayed updates have been made.
        second_slot: whether the storage has two places for everything, so that a run that is killed can be resumed;
            without, it takes half the disk, and only a run that was closed can.
        split_master: whether a bfloat16 weight is the upper half of its float32 master; False stores whole masters
            beside the weights, which learns the same and reads and writes 2 B a parameter more each, for comparison.
        freeze: patterns over names of parameters that are not trained, such as ``"model.embed_tokens.*"``: they have no
            gradient and no state, and are only read.
        lora: adapters to train instead of the model's own parameters; None: none.
        chunk_elements: most parameters updated as one, a multiple of 4096.
        max_skipped_steps: steps in a row that may be skipped because they are not finite; in float16, steps that
            only lower the loss scale are not counted.
        head_chunk_tokens: tokens of a micro-batch whose logits exist at once, the head and the loss taking one such
            part after another; None: all, unless that takes much memory. Parts change the order of additions.
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
    matrix_products: str = "auto"
    hardware: Hardware | None = None
    delayed_share: float | None = None
    schedule: str = "vertical"
    group_size: int | None = None
    seed: int = 0
    layers_per_unit: int | None = 1
    snake: bool = True
    overlap: bool = True
    boundaries_on_device: float | None = None
    boundaries_on_ssd: float | None = None
    kept_activations: float | None = None
    gradients: str | None = None
    resident_weights: float | None = 0.0
    resident_state: float | None = 0.0
    snapshot_every: int | None = None
    second_slot: bool = True
    split_master: bool = True
    freeze: tuple[str, ...] = ()
    lora: Lora | None = None
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS
    max_skipped_steps: int = 10
    loss_scaling: LossScaling | None = None
    head_chunk_tokens: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_arguments(
            storage=self.storage,
            dtype=self.dtype,
            device=self.device,
            schedule=self.schedule,
            gradients=self.gradients,
            matrix_products=self.matrix_products,
            shares={name: getattr(self, name) for name in SHARES},
            counts={
                "layers_per_unit": self.layers_per_unit,
                "group_size": self.group_size,
                "snapshot_every": self.snapshot_every,
                "max_skipped_steps": self.max_skipped_steps,
                "head_chunk_tokens": self.head_chunk_tokens,
            },
            sizes={"host_memory": self.host_memory, "device_memory": self.device_memory},
            chunk_elements=self.chunk_elements,
        )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Settings by name.

        Raises:
            ConfigError: a name is unknown, or as for the class itself.
        """
        problems = cls._unknown(values)
        if isinstance(freeze := values.get("freeze"), str):
            problems.append(f"freeze: {freeze!r} is not a list of patterns; write [{freeze!r}]")
        if freeze and values.get("lora") is not None:
            problems.append("freeze, lora: give one of them; with adapters everything else is frozen")
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(**_with_hardware(_with_patterns(values)))

    @classmethod
    def _unknown(cls, values: Iterable[str]) -> list[str]:
        known = {one.name for one in fields(cls)}
        return [f"{name} is not a setting of a trainer" for name in values if name not in known]

    @property
    def rate(self) -> LearningRate:
        """The learning rate by step."""
        return self.learning_rate or LearningRate(peak=self.optimizer.lr)

    @property
    def steps_between_snapshots(self) -> int:
        """As asked for; else 1 where a snapshot costs next to nothing."""
        return steps_between_snapshots(self.snapshot_every, self.resident_weights, self.resident_state)

    @property
    def host_limit(self) -> int | None:
        """Bytes of host memory that may be used, None for what is free."""
        return None if self.host_memory is None else parse_bytes(self.host_memory)

    @property
    def device_limit(self) -> int | None:
        """Bytes of device memory that may be used, None for all."""
        return None if self.device_memory is None else parse_bytes(self.device_memory)

    def make_device(self) -> Device:
        """Where the run computes.

        Raises:
            ConfigError: there is no such device here.
        """
        products = "native" if self.dtype == "float32" else self.matrix_products
        return make_device(self.device, self.device_limit, self.seed, products)

    def request(self, *, separate_device: bool, device_free_bytes: int | None) -> PlanRequest:
        """What the plan is asked for.

        Args:
            separate_device: whether the device has memory of its own.
            device_free_bytes: of it, within the limit; None where it cannot be told.
        """
        return PlanRequest(
            hardware=self.hardware,
            layers_per_unit=self.layers_per_unit,
            group_size=self.group_size,
            snapshot_every=self.steps_between_snapshots,
            schedule=self.schedule,
            delayed_share=self.delayed_share,
            snake=self.snake,
            overlap=self.overlap,
            boundaries_on_device=self.boundaries_on_device,
            boundaries_on_ssd=self.boundaries_on_ssd,
            kept_activations=self.kept_activations,
            gradients=None if self.gradients is None else Tier(self.gradients),
            host_memory=self.host_limit,
            separate_device=separate_device,
            device_memory=self.device_limit if device_free_bytes is None else device_free_bytes,
            clipping=self.optimizer.max_grad_norm is not None,
            can_take_back=can_take_back(
                self.steps_between_snapshots,
                self.resident_weights,
                self.resident_state,
                second_slot=self.second_slot,
            ),
            resident_weights=self.resident_weights,
            resident_state=self.resident_state,
            head_chunk_tokens=self.head_chunk_tokens,
            configured_memory=self.device_limit if separate_device else self.host_limit,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` takes them back."""
        return {
            **asdict(replace(self, hardware=None)),
            "storage": [str(folder) for folder in self.storage],
            "hardware": None if self.hardware is None else self.hardware.model_dump(mode="json", exclude_none=True),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Settings from what :meth:`as_json` gave."""
        optimizer, rate, scaling = values["optimizer"], values["learning_rate"], values["loss_scaling"]
        lora = values["lora"]
        hardware = values.get("hardware")
        typed = {
            "hardware": None if hardware is None else Hardware.model_validate(hardware),
            "storage": tuple(map(Path, values["storage"])),
            "freeze": tuple(values["freeze"]),
            "lora": None if lora is None else Lora(**lora),
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
        changes = _with_patterns(changes)
        problems = self._unknown(changes)
        problems += [
            f"{name} was {getattr(self, name)!r} when the run began, so it cannot be {changes[name]!r} now"
            for name in LAYOUT
            if name in changes and changes[name] != getattr(self, name)
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        return replace(self, **_with_hardware(changes))


def _with_hardware(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with the machine's figures instead of the name of their file."""
    hardware = values.get("hardware")
    return {**values, **({"hardware": load_hardware(hardware)} if isinstance(hardware, str | Path) else {})}


def _with_patterns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with the patterns to freeze in a tuple, if they are given in another sequence."""
    freeze = values.get("freeze")
    return {**values, **({"freeze": tuple(freeze or ())} if "freeze" in values and not isinstance(freeze, str) else {})}
