"""Checks of what a trainer is made with, all problems at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from greedysnake.engine.devices import device_name_problem
from greedysnake.engine.opening import DTYPES
from greedysnake.engine.products import CHOICES
from greedysnake.errors import ConfigError
from greedysnake.models.layout import CHUNK_ALIGNMENT
from greedysnake.schedule import BUILDERS
from greedysnake.units import parse_bytes


def check_arguments(
    *,
    storage: Sequence[Path],
    dtype: str,
    device: str,
    schedule: str,
    gradients: str | None,
    matrix_products: str,
    shares: Mapping[str, float | None],
    counts: Mapping[str, int | None],
    sizes: Mapping[str, int | str | None],
    chunk_elements: int,
) -> None:
    """Refuse arguments that make no sense on any machine.

    Raises:
        ConfigError: listing all of them.
    """
    problems = []
    if not storage:
        problems.append("storage: give at least one folder")
    if len(set(storage)) != len(storage):
        problems.append(f"storage: give each folder once, got {', '.join(map(str, storage))}")
    if problem := device_name_problem(device):
        problems.append(f"device: {problem}")
    allowed: dict[str, tuple[Any, list[Any]]] = {
        "dtype": (dtype, list(DTYPES)),
        "schedule": (schedule, list(BUILDERS)),
        "gradients": (gradients, [None, "host", "ssd"]),
        "matrix_products": (matrix_products, list(CHOICES)),
    }
    for name, (value, choices) in allowed.items():
        if value not in choices:
            problems.append(f"{name}: {value!r} is not one of {', '.join(str(choice) for choice in choices)}")
    for name, count in counts.items():
        if count is not None and count < 1:
            problems.append(f"{name}: must be at least 1, got {count}")
    if schedule == "horizontal" and (counts["group_size"] or 1) > 1:
        problems.append(
            f"group_size: must be 1 or None with the schedule 'horizontal', got {counts['group_size']}; the vertical "
            f"schedule has groups"
        )
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            problems.append(f"{name}: must lie between 0 and 1, got {share}")
    on_device, on_ssd = shares["boundaries_on_device"] or 0.0, shares["boundaries_on_ssd"] or 0.0
    if on_device + on_ssd > 1 + 1e-9:
        problems.append(
            f"boundaries_on_device, boundaries_on_ssd: together at most 1, got {on_device} and {on_ssd}; the rest "
            f"waits in host memory"
        )
    if on_device and device in ("auto", "cpu"):
        problems.append(f"boundaries_on_device: must be 0 where the device is {device!r}, got {on_device}")
    if matrix_products == "float32" and device.startswith("cuda"):
        problems.append(f"matrix_products: must be 'auto' or 'native' where the device is {device!r}, got 'float32'")
    for name, size in sizes.items():
        try:
            parse_bytes(0 if size is None else size)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if chunk_elements <= 0 or chunk_elements % CHUNK_ALIGNMENT:
        problems.append(f"chunk_elements: must be a positive multiple of {CHUNK_ALIGNMENT}, got {chunk_elements}")
    if problems:
        raise ConfigError("\n".join(problems))
