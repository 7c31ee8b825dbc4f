"""A run's store and model: made for a new run, or opened to read a committed one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from greedysnake.engine.unit_store import write_unit
from greedysnake.errors import ModelError, StorageError
from greedysnake.models.checkpoint import Checkpoint, read_config
from greedysnake.models.initialize import initialize_units
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.storage import Store

MODEL_FOLDER = "model"
BUFFERS_NAME = "buffers.safetensors"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def config_of(model: str | Path | PretrainedConfig | PreTrainedModel) -> PretrainedConfig:
    """The transformers config of what a user calls a model: a folder, a config, or a loaded model.

    Raises:
        ModelError: the folder is missing or broken, or ``model`` is something else.
    """
    if isinstance(model, PretrainedConfig):
        return model
    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, str | Path):
        return read_config(Path(model))
    raise ModelError(
        f"model must be a model folder, a transformers config or a loaded PreTrainedModel, got {type(model).__name__}"
    )


def frozen_names(model: str | Path | PretrainedConfig | PreTrainedModel) -> frozenset[str]:
    """Parameters of a loaded model that its owner has frozen (``requires_grad`` is False)."""
    if not isinstance(model, PreTrainedModel):
        return frozenset()
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def write_model(
    store: Store, skeleton: Skeleton, model: str | Path | PretrainedConfig | PreTrainedModel, seed: int
) -> None:
    """Put the first weights of a run into its store, a unit at a time (embedding and head together).

    Args:
        store: of the new run.
        skeleton: the model.
        model: where weights come from; a config gives random ones.
        seed: of random weights.
    """
    checkpoint = Checkpoint(Path(model), config_of(model)) if isinstance(model, str | Path) else None
    last = len(skeleton.layouts) - 1
    for units in [(0, last), *((unit,) for unit in range(1, last))]:
        masters = {unit: torch.zeros(skeleton.layouts[unit].gradient_elements) for unit in units}
        initialize_units(skeleton, masters, seed)
        if checkpoint is not None:
            checkpoint.fill(skeleton, masters)
        elif isinstance(model, PreTrainedModel):
            _copy_weights(skeleton, masters, model)
        for unit in units:
            write_unit(store, unit, skeleton.layouts[unit], masters.pop(unit))
    folder = store.folder / MODEL_FOLDER
    skeleton.model.config.save_pretrained(folder)
    if skeleton.model.can_generate():
        if isinstance(model, str | Path) and (Path(model) / "generation_config.json").is_file():
            skeleton.model.generation_config = GenerationConfig.from_pretrained(Path(model))
        skeleton.model.generation_config.save_pretrained(folder)
    save_file({name: b.clone() for name, b in skeleton.persistent_buffers().items()}, folder / BUFFERS_NAME)


def _copy_weights(skeleton: Skeleton, masters: Mapping[int, Tensor], model: PreTrainedModel) -> None:
    """Weights and buffers of a loaded model."""
    values = model.state_dict()
    for unit, master in masters.items():
        for slot in skeleton.layouts[unit].parameters:
            slot.gradient(master).copy_(values[slot.name])
    for name, buffer in skeleton.persistent_buffers().items():
        buffer.copy_(values[name])


def open_committed(folder: Path) -> tuple[Store, Skeleton, dict[str, Any]]:
    """A committed run's store to read from, its model, and what the run wrote about itself.

    Raises:
        StorageError: there is no readable store.
    """
    store, contents = Store.open(folder)
    try:
        config = read_config(folder / MODEL_FOLDER)
        skeleton = build_skeleton(
            config,
            dtype=DTYPES[contents["dtype"]],
            layers_per_unit=int(contents["layers_per_unit"]),
            chunk_elements=int(contents["chunk_elements"]),
        )
        saved = load_file(folder / MODEL_FOLDER / BUFFERS_NAME)
        for name, buffer in skeleton.persistent_buffers().items():
            buffer.copy_(saved[name])
        if skeleton.model.can_generate() and (folder / MODEL_FOLDER / "generation_config.json").is_file():
            skeleton.model.generation_config = GenerationConfig.from_pretrained(folder / MODEL_FOLDER)
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        store.close()
        raise StorageError(f"the store {folder} does not describe its model: {error!r}") from error
    except BaseException:
        store.close()
        raise
    return store, skeleton, contents
