"""Writing the model in a run's store as a model folder, with what belongs beside it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from greedysnake.engine.opening import CODE_FILES, DTYPES, MODEL_FOLDER, TOKENIZER_FOLDER
from greedysnake.engine.unit_store import read_unit
from greedysnake.errors import ConfigError
from greedysnake.models.export import DEFAULT_SHARD_BYTES, ExportOptions, export_adapter, export_model
from greedysnake.models.skeleton import Skeleton
from greedysnake.storage import Store
from greedysnake.units import parse_bytes


def export_options(
    dtype: str | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_BYTES,
    *,
    overwrite: bool = False,
    beside: Mapping[str, Path] = MappingProxyType({}),
    progress: Callable[[int, int], None] | None = None,
) -> ExportOptions:
    """What a user asks of an export, checked.

    Raises:
        ConfigError: the dtype or the size is none.
    """
    problems = []
    if dtype is not None and dtype not in DTYPES:
        problems.append(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    try:
        shard_bytes = parse_bytes(max_shard_size)
        if shard_bytes < 1:
            raise ValueError(f"{max_shard_size!r} leaves no room for anything; write a size such as 5GB")
    except ValueError as error:
        problems.append(f"max_shard_size: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    chosen = None if dtype is None else DTYPES[dtype]
    return ExportOptions(
        dtype=chosen, shard_bytes=shard_bytes, overwrite=overwrite, beside=dict(beside), progress=progress
    )


def companion_files(store: Path, tokenizer: Path | None = None) -> dict[str, Path]:
    """What is exported with a model besides weights and configs, by its name in the exported folder.

    Args:
        store: the first of the run's storage folders: what it took over from the model folder that the run began from.
        tokenizer: a folder with the tokenizer, instead of the one there.
    """
    folder = tokenizer or store / MODEL_FOLDER / TOKENIZER_FOLDER
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return found | {path.name: path for pattern in CODE_FILES for path in (store / MODEL_FOLDER).glob(pattern)}


def export_store(
    store: Store,
    skeleton: Skeleton,
    folder: Path,
    options: ExportOptions,
    *,
    base_model: str | None,
    merge: bool,
) -> bool:
    """Write the model in a store, a unit at a time; of one with LoRA the adapters alone.

    Args:
        store: complete: it holds the newest of every unit.
        skeleton: the model.
        folder: to be created; it appears when it is complete.
        options: dtype, size of the files and more.
        base_model: where the model that adapters are for is, if that is known.
        merge: with LoRA, write the whole model instead, with the adapters merged into its weights.

    Returns:
        Whether the folder holds adapters alone.

    Raises:
        ModelError: the folder is there already, cannot be written or is too large for the disk, or the dtype cannot
            hold a weight.
    """

    def read(unit: int, masters: bool) -> dict[str, Tensor]:
        return read_unit(store, unit, skeleton.layouts[unit], masters=masters)

    adapter = skeleton.lora is not None and not merge
    if adapter:
        export_adapter(skeleton, read, folder, base_model, options)
    else:
        export_model(skeleton, read, folder, options)
    return adapter
