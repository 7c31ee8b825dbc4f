"""A run's store and model: made for a new run, or opened to read a committed one."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from greedysnake.engine import loading
from greedysnake.engine.loading import (
    TOKENIZER_FOLDER,
    LoadedSoFar,
    commit_so_far,
    is_half_loaded,
    refuse_half_loaded,
    unit_groups,
)
from greedysnake.engine.unit_store import write_unit
from greedysnake.errors import ModelError, StorageError
from greedysnake.models.checkpoint import Checkpoint, check_not_quantised, read_config
from greedysnake.models.hub import local_folder
from greedysnake.models.initialize import initialize_units
from greedysnake.models.lora import Lora
from greedysnake.models.skeleton import Skeleton, build_skeleton
from greedysnake.storage import Store, System

MODEL_FOLDER = "model"
BUFFERS_NAME = "buffers.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)
CODE_FILES = ("*.py",)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def storage_paths(storage: Sequence[str | Path] | str | Path) -> tuple[Path, ...]:
    """The storage folders that a user named, one or several."""
    return (Path(storage),) if isinstance(storage, str | Path) else tuple(map(Path, storage))


def config_of(
    model: str | Path | PretrainedConfig | PreTrainedModel, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The transformers config of what a user calls a model: a folder, a name on the hub, a config, or a loaded model.

    Raises:
        ModelError: the folder is missing or broken, or needs code that is not trusted; the model is quantised; or
            ``model`` is something else.
    """
    if isinstance(model, PretrainedConfig | PreTrainedModel):
        config = model if isinstance(model, PretrainedConfig) else model.config
        check_not_quantised(config, f"the model of type {config.model_type!r}")
        return config
    if isinstance(model, str | Path):
        folder = local_folder(model, with_code=trust_remote_code)
        return read_config(folder, trust_remote_code=trust_remote_code)
    raise ModelError(
        f"model must be a model folder, a transformers config or a loaded PreTrainedModel, got {type(model).__name__}"
    )


def frozen_names(model: str | Path | PretrainedConfig | PreTrainedModel) -> frozenset[str]:
    """Parameters of a loaded model that its owner has frozen (``requires_grad`` is False)."""
    if not isinstance(model, PreTrainedModel):
        return frozenset()
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def write_model(
    loaded: LoadedSoFar,
    skeleton: Skeleton,
    model: str | Path | PretrainedConfig | PreTrainedModel,
    seed: int,
    *,
    stored: PretrainedConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Put the first weights of a run into its store, a unit at a time (embedding and head together).

    Args:
        loaded: the store of the new run, and what is in it already.
        skeleton: the model.
        model: where weights come from; a config gives random ones.
        seed: of random weights.
        stored: config of the weights in a model folder, where the model has more tokens than they have; None: its own.
        progress: told bytes of weights that are in the store and those of the model.

    Returns:
        A digest of each file beside the weights, by name; what a commit says about them.
    """
    checkpoint = Checkpoint(Path(model), stored or skeleton.model.config) if isinstance(model, str | Path) else None
    store, layouts, groups = loaded.store, skeleton.layouts, unit_groups(skeleton)
    total, since_commit = sum(layout.weight_bytes for layout in layouts), 0
    there = sum(layouts[unit].weight_bytes for units in groups[: loaded.done] for unit in units)
    for done, units in enumerate(groups[loaded.done :], loaded.done + 1):
        if progress is not None:
            progress(there, total)
        masters = {unit: torch.zeros(skeleton.layouts[unit].elements) for unit in units}
        initialize_units(skeleton, masters, seed, buffers_only=not isinstance(model, PretrainedConfig))
        if checkpoint is not None:
            checkpoint.fill(skeleton, masters, seed)
        elif isinstance(model, PreTrainedModel):
            _copy_weights(skeleton, masters, model)
        for unit in units:
            write_unit(store, unit, layouts[unit], masters.pop(unit))
            there += layouts[unit].weight_bytes
            since_commit += sum(chunk.weight_bytes + chunk.state_bytes for chunk in layouts[unit].chunks)
            since_commit += sum(chunk.weight_bytes for chunk in layouts[unit].frozen)
        if since_commit >= loading.COMMIT_BYTES and done < len(groups) and loaded.source is not None:
            commit_so_far(loaded, skeleton, done)
            since_commit = 0
    if progress is not None:
        progress(total, total)
    folder = store.folders[0] / MODEL_FOLDER
    skeleton.model.config.save_pretrained(folder)
    if skeleton.model.can_generate():
        if isinstance(model, str | Path) and (Path(model) / "generation_config.json").is_file():
            skeleton.model.generation_config = GenerationConfig.from_pretrained(Path(model))
        skeleton.model.generation_config.save_pretrained(folder)
    if isinstance(model, str | Path):
        _copy_files(Path(model), TOKENIZER_FILES, folder / TOKENIZER_FOLDER)
        if type(skeleton.model.config).__module__.startswith("transformers_modules."):
            _copy_files(Path(model), CODE_FILES, folder)
    # all buffers, also those that a saved model leaves out: what they hold (rotary frequencies) is computed only once
    buffers = {name: buffer.contiguous().clone() for name, buffer in skeleton.model.named_buffers()}
    save_file(buffers, folder / BUFFERS_NAME)
    digests = _digests(folder)
    store.sync_owner_files()
    return {name: digest for name, digest in digests.items() if not name.startswith("loading-")}


def _copy_files(model: Path, patterns: Sequence[str], target: Path) -> None:
    """Copy files of a model folder."""
    for path in sorted({path for pattern in patterns for path in model.glob(pattern)}):
        if path.is_file():
            copy = target / path.relative_to(model)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _digests(folder: Path) -> dict[str, str]:
    """BLAKE2 of each file in a folder and the folders in it, by its path there."""
    return {
        str(path.relative_to(folder)): blake2b(path.read_bytes(), digest_size=16).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _copy_weights(skeleton: Skeleton, masters: Mapping[int, Tensor], model: PreTrainedModel) -> None:
    """Weights and buffers of a loaded model."""
    values = model.state_dict()
    for unit, master in masters.items():
        for name, slot in skeleton.base_slots(unit).items():
            slot.gradient(master).copy_(values[name])
    for name, buffer in skeleton.persistent_buffers().items():
        buffer.copy_(values[name])


def open_committed(
    folders: Sequence[Path], *, writable: bool = False, system: System | None = None
) -> tuple[Store, Skeleton, dict[str, Any]]:
    """A committed run's store, its model, and what the run wrote about itself.

    Args:
        folders: all of the store's, in order.
        writable: whether the run will go on.
        system: the store's system calls.

    Raises:
        StorageError: there is no readable store.
    """
    store, contents = Store.open(folders, writable=writable, accept_mixed=is_half_loaded, system=system)
    folder = Path(folders[0])
    try:
        refuse_half_loaded(contents, folder)
        _check_model_files(folder / MODEL_FOLDER, contents["model_files"])
        trusted = contents["settings"].get("trust_remote_code", False)
        config = read_config(folder / MODEL_FOLDER, trust_remote_code=trusted)
        skeleton = build_skeleton(
            config,
            dtype=DTYPES[contents["settings"]["dtype"]],
            layers_per_unit=int(contents["settings"]["layers_per_unit"]),
            chunk_elements=int(contents["settings"]["chunk_elements"]),
            split_master=bool(contents["settings"].get("split_master", True)),
            frozen=frozenset(contents["frozen"]),
            lora=None if (lora := contents["settings"]["lora"]) is None else Lora(**lora),
        )
        saved = load_file(folder / MODEL_FOLDER / BUFFERS_NAME)
        for name, buffer in skeleton.model.named_buffers():
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


def _check_model_files(folder: Path, expected: Mapping[str, str]) -> None:
    found = _digests(folder) if folder.is_dir() else {}
    wrong = [
        f"{folder / name} is {'missing' if name not in found else 'not as it was written'}"
        for name, digest in expected.items()
        if found.get(name) != digest
    ]
    if wrong:
        raise StorageError("\n".join(wrong))


def check_undamaged(store: Store, progress: Callable[[int, int], None] | None = None) -> None:
    """Read all that the last commit holds, and compare it with its checksums.

    Args:
        store: an open one.
        progress: told bytes read so far and in all.

    Raises:
        StorageError: something is damaged or cannot be read: which file, where, and what was there.
    """
    damages = store.verify(progress)
    if not damages:
        return
    shown = "\n  ".join(map(str, damages[:10]))
    more = f"\n  and {len(damages) - 10} more" if len(damages) > 10 else ""
    if not any(damage.readable for damage in damages):
        raise StorageError(
            f"the last snapshot in {store.folders[0]} cannot be read, and was left as it is:\n  {shown}{more}\nSee "
            f"that its disk is well and mounted, and try again"
        )
    raise StorageError(
        f"the last snapshot in {store.folders[0]} is damaged, so it is not used:\n  {shown}{more}\nThe disk "
        f"changed what was written to it: look at its health, and begin again from an export or a copy of the store"
    )
