"""Pretrained model folders, read unit by unit without ever holding the model."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from greedysnake.errors import ModelError
from greedysnake.models.shards import INDEX_NAME, SINGLE_NAME
from greedysnake.models.skeleton import Skeleton, empty_model


def read_config(folder: Path) -> PretrainedConfig:
    """The transformers config of a model folder.

    Raises:
        ModelError: there is no such folder, or its config cannot be read.
    """
    if not folder.is_dir():
        raise ModelError(
            f"the model folder {folder} does not exist. Give the path of a folder with config.json and safetensors "
            f"weights in model.path, or a config for random weights in model.config"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json, so it is not a transformers model")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(f"the config of the model folder {folder} cannot be read: {error}") from error


class Checkpoint:
    """Weights of a model folder.

    Args:
        folder: holds ``model.safetensors`` or shards with their index.
        config: the folder's config.

    Raises:
        ModelError: there are no safetensors weights, or files are missing or damaged.
    """

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        self._folder = folder
        self._files = _weight_files(folder)
        self._empty = empty_model(config, torch.float32)
        self._targets = self._rename()

    def _rename(self) -> dict[str, str]:
        """Each stored key's name in the model."""
        mapping = get_model_conversion_mapping(self._empty)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state = self._empty.state_dict()
        targets = {}
        for key in self._files:
            target, _ = rename_source_key(key, renamings, converters, self._empty.base_model_prefix, state)
            targets[key] = key if target not in state and key in state else target
        return targets

    def fill(self, skeleton: Skeleton, masters: Mapping[int, Tensor]) -> None:
        """Read the weights of units, and the model's persistent buffers in them.

        Args:
            skeleton: the model, built from the same config.
            masters: by unit, float32 memory with the layout of its gradient buffer, filled in place.

        Raises:
            ModelError: a weight is missing, damaged or of another shape.
        """
        slots = {slot.name: slot.gradient(masters[u]) for u in masters for slot in skeleton.layouts[u].parameters}
        prefixes = [f"{skeleton.structure.layers_name}.{i}." for u in masters for i in skeleton.unit_layers[u]]
        buffers = skeleton.persistent_buffers()
        inside = f"{skeleton.structure.layers_name}."

        def wanted(target: str) -> bool:
            if prefixes:
                return target.startswith(tuple(prefixes))
            return not target.startswith(inside)

        keys = [key for key, target in self._targets.items() if wanted(target)]
        try:
            self._load(keys)
            self._empty.tie_weights()
            loaded = dict(self._empty.named_parameters(remove_duplicate=False))
            missing = [name for name in slots if loaded[name].is_meta]
            if missing:
                raise ModelError(
                    f"the model folder {self._folder} lacks {len(missing)} weights that its config asks for: "
                    f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
                )
            for name, target in slots.items():
                target.copy_(loaded[name].detach())
            for name, buffer in self._empty.named_buffers():
                if name in buffers and not buffer.is_meta:
                    buffers[name].copy_(buffer)
        finally:
            _forget(self._empty)

    def _load(self, keys: list[str]) -> None:
        opened: dict[Path, Any] = {}
        try:
            pieces = {}
            for key in keys:
                path = self._files[key]
                if path not in opened:
                    opened[path] = safe_open(path, framework="pt", device="cpu")
                pieces[key] = opened[path].get_slice(key)
            mapping = get_model_conversion_mapping(self._empty)
            settings = LoadStateDictConfig(weight_mapping=mapping, dtype=torch.float32)
            with _no_progress_bar():  # transformers shows one for each call, so one for each unit
                info, _ = convert_and_load_state_dict_in_model(self._empty, pieces, settings)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"the weights in the model folder {self._folder} cannot be read: {error}") from error
        problems = [*map(str, info.mismatched_keys), *map(str, info.conversion_errors), *map(str, info.error_msgs)]
        if problems:
            raise ModelError(
                f"weights in the model folder {self._folder} do not fit its config: {'; '.join(problems[:3])}"
            )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _weight_files(folder: Path) -> dict[str, Path]:
    """The file of each stored key."""
    index = folder / INDEX_NAME
    try:
        if index.is_file():
            entries = json.loads(index.read_text())["weight_map"]
            files = {key: folder / name for key, name in entries.items()}
        elif (folder / SINGLE_NAME).is_file():
            with safe_open(folder / SINGLE_NAME, framework="pt", device="cpu") as file:
                files = dict.fromkeys(file.keys(), folder / SINGLE_NAME)
        else:
            pickled = sorted(folder.glob("*.bin"))
            reason = (
                f"it holds {pickled[0].name}, a pickle, which can run any code when opened. Convert it to safetensors "
                f"with save_pretrained on a machine where you trust it"
                if pickled
                else f"{SINGLE_NAME} and {INDEX_NAME} are both missing"
            )
            raise ModelError(f"the model folder {folder} has no safetensors weights: {reason}")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the weights in the model folder {folder} cannot be read: {error}") from error
    lost = sorted({path.name for path in files.values() if not path.is_file()})
    if lost:
        raise ModelError(f"the model folder {folder} lacks weight files that its index names: {', '.join(lost[:5])}")
    outside = [path for path in files.values() if path.resolve().parent != folder.resolve() and not path.is_symlink()]
    if outside:
        raise ModelError(f"the index of the model folder {folder} names a file outside it: {outside[0]}")
    return files


def _forget(model: PreTrainedModel) -> None:
    """Back to the meta device: free what was loaded."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device="meta"))
    model.tie_weights()
    model.__dict__.pop("_weight_conversions", None)
