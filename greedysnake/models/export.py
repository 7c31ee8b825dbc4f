"""Writing a model folder that ``from_pretrained`` loads, unit by unit."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from greedysnake.errors import ModelError
from greedysnake.models.checkpoint import INDEX_NAME
from greedysnake.models.lora import merge_adapters, write_adapter
from greedysnake.models.skeleton import Skeleton

ReadUnit = Callable[[int], dict[str, Tensor]]
"""Gives a unit's parameters by full name, in memory that nobody else uses."""


def export_model(skeleton: Skeleton, read_unit: ReadUnit, folder: Path) -> None:
    """Write the model as one safetensors shard a unit, with index and config; tied weights once, adapters merged.

    Args:
        skeleton: the model.
        read_unit: gives a unit's parameters.
        folder: to be created; must not exist, or be empty.

    Raises:
        ModelError: the folder is there already, or cannot be written.
    """
    with _completed(folder) as partial:
        _write_shards(skeleton, read_unit, partial)
        skeleton.model.config.save_pretrained(partial)
        if skeleton.model.can_generate():
            skeleton.model.generation_config.save_pretrained(partial)


def export_adapter(skeleton: Skeleton, read_unit: ReadUnit, folder: Path, base_model: str | None) -> None:
    """Write what was trained beside a model as a folder that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        skeleton: the model, with adapters.
        read_unit: gives a unit's parameters.
        folder: to be created; must not exist, or be empty.
        base_model: where the model that the adapters are for is, if that is known.

    Raises:
        ModelError: the folder is there already, or cannot be written.
    """
    if skeleton.lora is None:
        raise ModelError("the model has no adapters")
    with _completed(folder) as partial:
        trained: dict[str, Tensor] = {}
        for unit, layout in enumerate(skeleton.layouts):
            if layout.chunks:
                own = read_unit(unit)
                trained |= {slot.name: own[slot.name].clone() for slot in layout.parameters if slot.trainable}
        write_adapter(skeleton.model, skeleton.lora, trained, partial, base_model)


@contextmanager
def _completed(folder: Path) -> Iterator[Path]:
    """A folder to write to that appears under its name when it is complete, not before.

    Raises:
        ModelError: there is something under the name already, or it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists already and is not empty. Choose another folder for the export")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise ModelError(f"cannot write the model folder {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(skeleton: Skeleton, read_unit: ReadUnit, folder: Path) -> None:
    buffers = skeleton.persistent_buffers()
    units = len(skeleton.layouts)
    weight_map: dict[str, str] = {}
    total = 0
    for unit in range(units):
        prefixes = tuple(f"{skeleton.structure.layers_name}.{i}." for i in skeleton.unit_layers[unit])
        own = {name: b for name, b in buffers.items() if prefixes and name.startswith(prefixes)}
        if unit == 0:
            own = {n: b for n, b in buffers.items() if not n.startswith(f"{skeleton.structure.layers_name}.")}
        weights = read_unit(unit)
        if skeleton.lora is not None:
            weights = merge_adapters(skeleton.model, weights)
        tensors = revert_weight_conversion(skeleton.model, {**weights, **own})
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        file_name = f"model-{unit + 1:05d}-of-{units:05d}.safetensors"
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
