"""Writing a model folder that ``from_pretrained`` loads, unit by unit."""

import copy
import glob
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from greedysnake.errors import ModelError, StorageError
from greedysnake.models.lora import base_name, merge_adapters, without_adapters, write_adapter
from greedysnake.models.shards import INDEX_NAME, ShardWriter, TensorSize, index_of, plan_shards
from greedysnake.models.skeleton import Skeleton, kept_in_float32
from greedysnake.storage import System
from greedysnake.storage.small_files import sync_folder, sync_tree
from greedysnake.units import format_bytes

DEFAULT_SHARD_BYTES = 5 * 2**30

UnitReader = Callable[[int, bool], Mapping[str, Tensor]]
"""Gives a unit's parameters by full name: its weights, or, if the second argument is true, its float32 masters."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a model folder is written.

    Attributes:
        dtype: of the weights; None: the run's. Parameters that the architecture keeps in float32 are float32 in any
            case. ``torch.float32`` writes the master weights exactly.
        shard_bytes: most content of a file; a tensor is never cut.
        overwrite: whether a model folder that is there already is replaced.
        beside: files that are copied into the model folder, such as a tokenizer's, by their path there.
        progress: told bytes of weights written so far and in all.
    """

    dtype: torch.dtype | None = None
    shard_bytes: int = DEFAULT_SHARD_BYTES
    overwrite: bool = False
    beside: Mapping[str, Path] = field(default_factory=dict)
    progress: Callable[[int, int], None] | None = None


def export_model(skeleton: Skeleton, read_unit: UnitReader, folder: Path, options: ExportOptions | None = None) -> None:
    """Write the model as safetensors files with config, in the layout in which such models are published.

    One unit is in memory at a time. Tied weights are written once. The folder appears under its name when it is
    complete and on the disk, not before; what an export that was killed leaves has another name, and the next
    export to the same folder removes it, or gives a model that was about to be replaced its name back.

    Args:
        skeleton: the model.
        read_unit: gives the parameters of a unit.
        folder: to be created; must not exist, or be empty, unless ``options.overwrite``.
        options: dtype, size of the files and more.

    Raises:
        ModelError: the folder is there already, cannot be written or is too large for the disk, or the dtype cannot
            hold a weight.
    """
    options = options or ExportOptions()
    with completed_folder(folder, overwrite=options.overwrite) as partial:
        _write_folder(skeleton, read_unit, partial, options)


def export_adapter(
    skeleton: Skeleton,
    read_unit: UnitReader,
    folder: Path,
    base_model: str | None,
    options: ExportOptions | None = None,
) -> None:
    """Write what was trained beside a model as a folder that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        skeleton: the model, with adapters.
        read_unit: gives the parameters of a unit.
        folder: as for :func:`export_model`.
        base_model: where the model that the adapters are for is, if that is known.
        options: likewise; adapters are one file of any size.

    Raises:
        ModelError: as for :func:`export_model`.
    """
    options = options or ExportOptions()
    if skeleton.lora is None:
        raise ModelError("the model has no adapters")
    with completed_folder(folder, overwrite=options.overwrite) as partial:
        trained: dict[str, Tensor] = {}
        for unit, layout in enumerate(skeleton.layouts):
            names = [slot.name for slot in layout.parameters if slot.trainable]
            if names:
                own = read_unit(unit, options.dtype is not None)
                trained |= {name: own[name].to(options.dtype or own[name].dtype, copy=True) for name in names}
        write_adapter(skeleton.model, skeleton.lora, trained, partial, base_model)
        _copy_beside(partial, options)


@contextmanager
def completed_folder(folder: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write to that appears under its name when it is complete and on the disk, not before.

    Raises:
        ModelError: there is something under the name already, or it cannot be written.
    """
    folder = Path(os.path.abspath(folder))  # as "." has no name
    partial = _hidden_twin(folder, "partial")
    try:
        _tidy_up(folder)
        _check_target(folder, overwrite=overwrite)
        partial.mkdir(parents=True)
        try:
            yield partial
            _flush(partial, folder)
            _replace(folder, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write the model folder {folder}: {error}") from error


def _write_folder(skeleton: Skeleton, read_unit: UnitReader, folder: Path, options: ExportOptions) -> None:
    dtypes = _dtypes(skeleton, options.dtype)
    tensors: dict[str, TensorSize] = {}
    for unit, layout in enumerate(skeleton.layouts):
        empty = {s.name: torch.empty(s.shape, dtype=dtypes[s.name], device="meta") for s in layout.parameters}
        buffers = {name: torch.empty_like(buffer, device="meta") for name, buffer in _buffers(skeleton, unit)}
        whole = {**without_adapters(empty), **buffers}
        tensors |= {name: TensorSize.of(t) for name, t in _published(skeleton, whole).items()}
    shards = plan_shards(tensors, options.shard_bytes)
    needed, free = sum(shard.bytes for shard in shards), shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"the disk of {folder.parent} is too small for the export: it takes {format_bytes(needed)} ({needed:,} "
            f"bytes), and {format_bytes(free)} ({free:,} bytes) are free. Free space, or export to another disk"
        )
    done = 0
    with ShardWriter(folder, shards, tensors) as writer:
        for unit, layout in enumerate(skeleton.layouts):
            from_masters = any(dtypes[slot.name] != slot.dtype for slot in layout.parameters)
            parameters = read_unit(unit, from_masters)
            if skeleton.lora is not None:
                parameters = merge_adapters(skeleton.model, dict(parameters))
            own = {**_cast(parameters, dtypes), **dict(_buffers(skeleton, unit))}
            for name, tensor in _published(skeleton, own).items():
                writer.write(name, tensor)
                done += tensor.numel() * tensor.element_size()
            own.clear()
            writer.flush()
            if options.progress is not None:
                options.progress(done, needed)
        writer.finish()
    if len(shards) > 1:
        _write_text(folder / INDEX_NAME, json.dumps(index_of(shards, tensors), indent=2, sort_keys=True) + "\n")
    _copy_beside(folder, options)
    config = copy.deepcopy(skeleton.model.config)
    config.dtype = options.dtype or skeleton.model.dtype
    config.architectures = [type(skeleton.model).__name__]
    if skeleton.model.can_generate():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skeleton.model.generation_config.save_pretrained(folder)
    config.save_pretrained(folder)


def _copy_beside(folder: Path, options: ExportOptions) -> None:
    for name, source in options.beside.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)


def _dtypes(skeleton: Skeleton, wanted: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype in which each parameter is written."""
    slots = [slot for layout in skeleton.layouts for slot in layout.parameters]
    if wanted is None:
        return {name: slot.dtype for slot in slots for name in (slot.name, base_name(slot.name))}
    kept = kept_in_float32(skeleton.model, wanted)
    names = {slot.name for slot in slots} | {base_name(slot.name) for slot in slots}
    return {name: torch.float32 if kept(name) else wanted for name in names}


def _cast(parameters: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    cast = {name: tensor.to(dtypes[name]) for name, tensor in parameters.items()}
    for name, tensor in cast.items():
        before = parameters[name]
        if tensor.dtype == torch.float16 != before.dtype and not tensor.isfinite().equal(before.isfinite()):
            raise ModelError(
                f"the weight {name} has values of up to {before.abs().max().item():.3g}, and float16 ends at 65504. "
                f"Export as bfloat16 or float32"
            )
    return cast


def _buffers(skeleton: Skeleton, unit: int) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers that are saved with a unit: those outside the layers with the first."""
    prefixes = tuple(f"{skeleton.structure.layers_name}.{i}." for i in skeleton.unit_layers[unit])
    inside = f"{skeleton.structure.layers_name}."
    for name, buffer in skeleton.persistent_buffers().items():
        if name.startswith(prefixes) if prefixes else unit == 0 and not name.startswith(inside):
            yield name, buffer


def _published(skeleton: Skeleton, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a published model has them: under its names, experts apart, without what is not saved."""
    model = skeleton.model
    left_out = set(model._keys_to_ignore_on_save or ())
    saved = {_main_name(skeleton, name): t for name, t in tensors.items() if name not in left_out}
    return dict(revert_weight_conversion(model, saved))


def _main_name(skeleton: Skeleton, name: str) -> str:
    """The name under which transformers saves a tied weight: that of the one that the others are tied to."""
    parameter = skeleton.parameters.get(name)
    if parameter is None or name not in skeleton.model.all_tied_weights_keys:
        return name
    aliases = [other for other, p in skeleton.model.named_parameters(remove_duplicate=False) if p is parameter]
    return next((other for other in aliases if other not in skeleton.model.all_tied_weights_keys), name)


# Folders that appear whole or not at all


def _check_target(folder: Path, *, overwrite: bool) -> None:
    if _is_vacant(folder):
        return
    if not overwrite:
        raise ModelError(
            f"{folder} exists already and is not empty. Choose another folder for the export, or say --overwrite to "
            f"replace the model in it"
        )
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ModelError(
            f"{folder} is not replaced, as it holds something other than a model (it has no config.json). Choose "
            f"another folder for the export"
        )


def _hidden_twin(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}-{os.getpid()}")


def _is_vacant(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _tidy_up(folder: Path) -> None:
    """Undo what exports to the same folder left when they were killed.

    A model that was about to be replaced gets its name back; all else is removed.
    """
    for path in _leftovers(folder, "replaced"):
        if _is_vacant(folder):
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in _leftovers(folder, "partial"):
        shutil.rmtree(path, ignore_errors=True)


def _leftovers(folder: Path, what: str) -> list[Path]:
    """Hidden twins whose process is over; one of this process's number is of an earlier one, as in a container."""
    if not folder.parent.is_dir():
        return []
    prefix = f".{folder.name}.{what}-"
    found = {path: path.name.removeprefix(prefix) for path in folder.parent.glob(f"{glob.escape(prefix)}*")}
    return [
        path
        for path, process in found.items()
        if process.isdecimal() and (int(process) == os.getpid() or not _runs(int(process)))
    ]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(partial: Path, folder: Path) -> None:
    try:
        sync_tree(System(), partial)
    except StorageError as error:  # caught here alone, as reading the model raises it as well
        raise ModelError(f"cannot write the model folder {folder}: {error}") from error


def _replace(folder: Path, partial: Path) -> None:
    """Give the complete folder its name; what was there has another until it is deleted."""
    replaced = _hidden_twin(folder, "replaced")
    if folder.exists():
        folder.rename(replaced)
    try:
        partial.rename(folder)
    except BaseException:
        with suppress(OSError):
            replaced.rename(folder)
        raise
    sync_folder(System(), folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
