"""A machine as numbers: measured by ``greedysnake probe``, typed in, or one of the shipped profiles.

Rates are bytes per second in powers of 1000, as vendors give them; memory is bytes (16GiB may be written).
Every profile says where its figures come from.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from greedysnake.config.problem import Problem, shown
from greedysnake.config.values import NonNegative, Positive, Size, Text
from greedysnake.config.yaml_text import dump_yaml, parse_yaml
from greedysnake.errors import ConfigError
from greedysnake.plan.costs import Contention, DiskRates

Dtype = Literal["bfloat16", "float16", "float32"]


class Record(BaseModel):
    """Base of the parts of a profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Disk(Record):
    """What one storage folder, or all of them together, can move, in bytes per second."""

    name: Text
    read: Positive = Field(description="Reads alone.")
    write: Positive = Field(description="Writes alone, sustained.")
    mixed_read: Positive = Field(description="Reads while writes go on.")
    mixed_write: Positive = Field(description="Writes while reads go on.")
    capacity: Size = Field(description="Bytes that a run may take.")
    endurance: Positive | None = Field(default=None, description="Bytes that may be written in its life.")

    @model_validator(mode="after")
    def _mixed_is_no_faster(self) -> "Disk":
        if self.mixed_read > self.read or self.mixed_write > self.write:
            raise ValueError("needs mixed_read at most read, and mixed_write at most write")
        return self


class ComputeRates(Record):
    """Floating-point operations per second in one dtype."""

    matrix: Positive = Field(description="Large matrix products.")
    forward: Positive = Field(le=1, description="Share of it that a whole layer's forward reaches.")
    backward: Positive = Field(le=1, description="Share of it that recompute and backward of a layer reach.")
    head: Positive = Field(le=1, description="Share of it that the head reaches, loss included.")


class LayerTimes(Record):
    """Seconds measured with the units of one model; they go before rates where that model is planned."""

    layer_parameters: int
    trained_parameters: int | None = Field(
        default=None, description="Of embedding, one layer and head together; null: all of them."
    )
    hidden: int
    vocabulary: int
    dtype: Dtype
    rows: int
    tokens: int
    embedding_forward: NonNegative
    embedding_backward: NonNegative
    layer_forward: Positive
    layer_backward: Positive
    layer_kept_forward: Positive | None = Field(
        default=None, description="Forward that leaves its activations for the backward; null: as the other forward."
    )
    layer_kept_backward: Positive | None = Field(
        default=None, description="Backward that finds them; null: what recompute and backward take less a forward."
    )
    head_forward: Positive
    head_backward: Positive = Field(description="Forward, loss and backward together.")

    def divided(self, factor: float) -> "LayerTimes":
        """The times of a machine that computes so many times as fast."""
        seconds = {name: value / factor for name, value in self if isinstance(value, float)}
        return self.model_copy(update=seconds)


class SharedCores(Record):
    """What computation, the host's optimizer and copies, and the disks' traffic take from each other."""

    compute: Positive = Field(default=1.0, le=1, description="Share of computation's speed beside optimizer or copies.")
    cpu: Positive = Field(default=1.0, le=1, description="Share of the speed of those beside computation.")
    transfer: NonNegative = Field(
        default=0.0, description="Seconds of computation lost for each byte that goes from or to the disks meanwhile."
    )


class Hardware(Record):
    """One machine with one accelerator, or none.

    Raises:
        pydantic.ValidationError: a figure is wrong or missing.
    """

    name: Text
    disks: tuple[Disk, ...] = Field(min_length=1, description="One for each storage folder.")
    together: Disk | None = Field(default=None, description="All folders at once, where that was measured.")
    host_memory: Size = Field(description="Bytes of host memory that a run may use.")
    device_memory: Size | None = Field(default=None, description="Bytes of the accelerator's own memory; null: none.")
    h2d: Positive | None = Field(default=None, description="Copies to the accelerator, bytes per second.")
    d2h: Positive | None = Field(default=None, description="Copies from it, bytes per second.")
    compute: dict[Dtype, ComputeRates] = Field(min_length=1)
    compute_memory: Positive = Field(description="Traffic with the memory that computation uses, bytes per second.")
    optimizer: Positive = Field(description="Parameters per second that the host updates.")
    copy_rate: Positive = Field(description="Bytes per second copied within host memory.")
    shared_cores: SharedCores = SharedCores()
    operation_seconds: NonNegative = Field(default=1e-4, description="What an operation takes besides its work.")
    step_seconds: NonNegative = Field(default=0.01, description="What a step takes outside its operations.")
    layer_times: tuple[LayerTimes, ...] = ()
    watts: Positive | None = Field(default=None, description="Power of the whole machine while it trains.")
    sources: dict[str, str] = Field(default={}, description="Where the figures come from.")

    @model_validator(mode="after")
    def _device_is_complete(self) -> "Hardware":
        given = [name for name in ("device_memory", "h2d", "d2h") if getattr(self, name) is not None]
        if given and len(given) < 3:
            missing = sorted({"device_memory", "h2d", "d2h"} - set(given))
            raise ValueError(
                f"an accelerator needs {' and '.join(missing)} too; a machine without one has none of them"
            )
        return self

    @property
    def separate_device(self) -> bool:
        """Whether computation has memory of its own."""
        return self.device_memory is not None

    @property
    def disk_rates(self) -> DiskRates:
        """Rates of all folders together: measured, or those of an even stripe, as fast as its slowest folder."""
        if self.together is not None:
            disk, count = self.together, 1
        else:
            disk, count = self.disks[0], len(self.disks)
        rates = {
            name: count * (getattr(disk, name) if self.together else min(getattr(one, name) for one in self.disks))
            for name in ("read", "write", "mixed_read", "mixed_write")
        }
        return DiskRates(**rates)

    @property
    def disk_capacity(self) -> int:
        """Bytes of an even stripe over all folders."""
        return len(self.disks) * min(disk.capacity for disk in self.disks)

    @property
    def contention(self) -> Contention:
        """How computation and the host's other work slow each other down."""
        shared = self.shared_cores
        return Contention(compute=shared.compute, cpu=shared.cpu, transfer=shared.transfer)


def profile_names() -> list[str]:
    """The shipped profiles."""
    folder = files("greedysnake.plan") / "profiles"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_hardware(name: str | Path) -> Hardware:
    """A shipped profile by its name, or a file that ``probe`` or a person wrote (YAML or JSON).

    Raises:
        ConfigError: there is no such profile or file, or it is wrong: every problem, a line each.
    """
    path = Path(name).expanduser()
    if str(name) in profile_names():
        text = (files("greedysnake.plan") / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ConfigError(
                f"{name}: neither a file nor a known machine; known are {', '.join(profile_names())}; "
                f"greedysnake probe writes a file for this one"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: cannot be read: {error}") from error
    try:
        data, problems = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{name}: found {shown(data)}; needs a mapping of a machine's figures, as in docs/planning.md"
        )
    try:
        hardware = Hardware.model_validate(data)
    except ValidationError as error:
        details = error.errors()
        inside = {detail["loc"][:depth] for detail in details for depth in range(1, len(detail["loc"]))}
        problems += [
            _problem(detail["loc"], detail["type"], detail["msg"], detail["input"])
            for detail in details
            if detail["loc"] not in inside  # what only follows from a problem further in
        ]
        hardware = None
    if problems or hardware is None:
        raise ConfigError(
            "\n  ".join([f"{name}: {len(problems)} problem{'s'[: len(problems) != 1]}", *map(str, problems)])
        )
    return hardware


def _problem(where: tuple[int | str, ...], kind: str, message: str, found: object) -> Problem:
    key = ".".join(map(str, where)) or "machine"
    if kind == "missing":
        return Problem(key, "missing; needs a value")
    if kind == "extra_forbidden":
        return Problem(
            key, f"unknown key; known are {', '.join(Hardware.model_fields)}" if len(where) == 1 else "unknown key"
        )
    text = message.removeprefix("Value error, ")
    return Problem(key, text if isinstance(found, dict) else f"found {shown(found)}; {text}")


def save_hardware(hardware: Hardware, path: Path) -> None:
    """Write a machine's figures to ``path``: JSON for a name that ends in .json, else YAML.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = hardware.model_dump(mode="json", exclude_none=True)
    text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else dump_yaml(data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def paced(hardware: Hardware, rate: int | None) -> Hardware:
    """The machine with disks that are no faster than ``rate``, in bytes a second."""
    if rate is None:
        return hardware
    names = ("read", "write", "mixed_read", "mixed_write")
    disks = tuple(
        disk.model_copy(update={name: min(getattr(disk, name), float(rate)) for name in names})
        for disk in hardware.disks
    )
    return hardware.model_copy(update={"disks": disks, "together": None})
