"""Pretrained model folders, read unit by unit without ever holding the model."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
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
from greedysnake.models.resize import fill_more_rows, resizable_parameters
from greedysnake.models.shards import DTYPE_NAMES, INDEX_NAME, SINGLE_NAME, read_header
from greedysnake.models.skeleton import Skeleton, empty_model

_DTYPES = frozenset(DTYPE_NAMES.values())


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The transformers config of a model folder.

    Args:
        folder: the model folder.
        trust_remote_code: whether Python code in the folder may be run, for a model that transformers does not know.

    Raises:
        ModelError: there is no such folder, its config cannot be read, it needs code that may not be run, or its
            weights are quantised.
    """
    if not folder.is_dir():
        raise ModelError(
            f"the model folder {folder} does not exist. Give the path of a folder with config.json and safetensors "
            f"weights in model.path, or a config for random weights in model.config"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json, so it is not a transformers model")
    _check_code(folder, trust_remote_code=trust_remote_code)
    try:
        # never None, with which transformers would ask on the terminal
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"the config of the model folder {folder} cannot be read: {error}") from error
    check_not_quantised(config, f"the model folder {folder}")
    return config


def _check_code(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuse a folder whose model is made of Python code of its own, unless that may be run."""
    try:
        values = json.loads((folder / "config.json").read_text())
        code, model_type = dict(values.get("auto_map") or {}), values.get("model_type")
    except (OSError, ValueError, TypeError, AttributeError):
        return  # what reads the config says it better
    if trust_remote_code or not code or model_type in CONFIG_MAPPING:
        return
    files = sorted({f"{str(name).partition('.')[0]}.py" for name in code.values()})
    raise ModelError(
        f"transformers knows no models of type {model_type!r}, and the model folder {folder} brings Python code for "
        f"them ({', '.join(files)}), which could do anything that you can. Read it; if you trust it, set "
        f"model.trust_remote_code: true"
    )


def check_not_quantised(config: PretrainedConfig, what: str) -> None:
    """Refuse weights that are kept in fewer bits than any dtype that can be trained.

    Raises:
        ModelError: naming the method.
    """
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found:
            method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
            raise ModelError(
                f"{what} is quantised ({getattr(method, 'value', method) or 'by a method that it does not name'}; see "
                f"quantization_config in its config.json), and rounded weights cannot be trained in full. Take the "
                f"original model in bfloat16, float16 or float32, or one that was dequantised and saved again"
            )


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
        self._check_dtypes()
        self._empty = empty_model(config, torch.float32)
        self._targets = self._rename()

    def _check_dtypes(self) -> None:
        """Refuse weights in dtypes that only quantised models have, also where the config does not say so."""
        try:
            stored = {n: t for path in set(self._files.values()) for n, t in read_header(path).items()}
        except (OSError, ValueError) as error:
            raise ModelError(f"the weights in the model folder {self._folder} cannot be read: {error}") from error
        odd = sorted(name for name in self._files if name in stored and stored[name].dtype not in _DTYPES)
        if odd:
            raise ModelError(
                f"the model folder {self._folder} is quantised: {odd[0]} and {len(odd) - 1} other weights are "
                f"{stored[odd[0]].dtype}. Take the original model in bfloat16, float16 or float32"
            )

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

    def fill(self, skeleton: Skeleton, masters: Mapping[int, Tensor], seed: int = 0) -> None:
        """Read the weights of units, and the model's persistent buffers in them.

        Args:
            skeleton: the model, built from the same config, or from one with more tokens.
            masters: by unit, float32 [layout.elements] laid out as its gradient buffer, filled in place.
            seed: of the rows that such a model has more of.

        Raises:
            ModelError: a weight is missing, damaged or of another shape.
        """
        slots = {name: slot.gradient(masters[u]) for u in masters for name, slot in skeleton.base_slots(u).items()}
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
                found = loaded[name].detach()
                if found.shape == target.shape:
                    target.copy_(found)
                elif name in resizable_parameters(skeleton.model):
                    fill_more_rows(target, found, seed)
                else:
                    raise ModelError(
                        f"models of type {skeleton.model.config.model_type!r} cannot be given more tokens: {name} has "
                        f"a size that depends on them too. Leave model.resize_embeddings out"
                    )
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
                f"it holds {pickled[0].name}, a pickle, which can run any code when opened. If you trust where it "
                f"comes from, convert it once: AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto')"
                f".save_pretrained('converted')"
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
