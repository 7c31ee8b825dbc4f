"""A new run's weights on their way into its store, so that a load that is broken off goes on where it was.

Every so many bytes what is there is committed, with a note that says how far the load is and of what. Such a store
holds no run yet: whoever makes a trainer with it goes on with the load if that is of the same weights, and begins
again if it is not.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from greedysnake.engine.unit_store import frozen_key, state_key, weights_key
from greedysnake.errors import StorageError
from greedysnake.models.skeleton import Skeleton
from greedysnake.storage import Store, System, remove_store
from greedysnake.storage.names import OWNER_FOLDER

COMMIT_BYTES = 256 * 2**20
"""Bytes of weights and state that are written between two commits of a load."""

TOKENIZER_FOLDER = "tokenizer"
"""Beside the store's own files: the tokenizer of the model folder that the run began from, file by file."""

LOADING = "loading"
"""Name of the note in a commit's contents."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class LoadedSoFar:
    """A store that takes in its first weights.

    Attributes:
        store: the store.
        source: digest of all that decides what is loaded; None if that cannot be told, and nothing is committed then.
        done: groups of units that are in it.
    """

    store: Store
    source: str | None
    done: int = 0


def source_digest(
    model: str | Path | PretrainedConfig | PreTrainedModel, skeleton: Skeleton, settings: Mapping[str, Any]
) -> str | None:
    """A digest of where weights come from and how they are laid out; None for a model in memory.

    Of weight files it takes name, size and time of the last change, not the content.
    """
    if isinstance(model, PreTrainedModel):
        return None
    parts: list[Any] = [
        skeleton.model.config.to_json_string(use_diff=False),
        sorted((slot.name, slot.trainable) for layout in skeleton.layouts for slot in layout.parameters),
        {name: str(value) for name, value in settings.items()},
    ]
    if isinstance(model, str | Path):
        for path in sorted(Path(model).iterdir()):
            if path.suffix in (".safetensors", ".json"):
                found = path.stat()
                parts.append([path.name, found.st_size, found.st_mtime_ns])
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def is_half_loaded(contents: Mapping[str, Any]) -> bool:
    """Whether these are the contents of a commit of a load; what it names is not written again, whatever the slots."""
    return LOADING in contents


def half_loaded(folders: Sequence[Path], system: System | None = None) -> dict[str, Any] | None:
    """The note in a store whose load was broken off; None if there is none, or no store."""
    contents = Store.contents_of(folders, system=system)
    return None if contents is None else contents.get(LOADING)


def open_or_create(
    folders: Sequence[Path],
    source: str | None,
    skeleton: Skeleton,
    *,
    scratch: Mapping[str, int],
    create: Callable[[], Store],
    system: System | None,
) -> LoadedSoFar:
    """The store of a new run: one whose load of the same weights was broken off, or a new one.

    Args:
        folders: of the store.
        source: what is to be loaded.
        skeleton: the model.
        scratch: the scratch extents that the store is to have.
        create: makes a new store with them.
        system: the store's system calls.

    Raises:
        StorageError: the folders are in use or hold something else, or as ``create`` does.
    """
    note = half_loaded(folders, system)
    if note is None:
        return LoadedSoFar(store=create(), source=source)
    store, contents = Store.open(folders, writable=True, accept_mixed=is_half_loaded, system=system)
    try:
        note = contents.get(LOADING, {})
        usable = source is not None and note.get("source") == source and _restore(store, skeleton, note)
        if usable:
            store.reserve_scratch(scratch)
    except BaseException:
        store.close()
        raise
    if usable:
        return LoadedSoFar(store=store, source=source, done=note["done"])
    store.close()
    remove_store(folders, system=system)
    return LoadedSoFar(store=create(), source=source)


def unit_groups(skeleton: Skeleton) -> list[tuple[int, ...]]:
    """Units that are loaded together, in order: embedding and head first, as they may share a parameter."""
    last = len(skeleton.layouts) - 1
    return [(0, last), *((unit,) for unit in range(1, last))]


def commit_so_far(loaded: LoadedSoFar, skeleton: Skeleton, done: int) -> None:
    """Make what has been loaded last: the first ``done`` groups of units, and the model's buffers as they are."""
    path = _buffers_path(loaded.store, done)
    path.parent.mkdir(exist_ok=True)
    save_file({name: buffer.contiguous().clone() for name, buffer in skeleton.model.named_buffers()}, path)
    loaded.store.sync_owner_files()
    note = {"source": loaded.source, "done": done, "groups": len(unit_groups(skeleton)), "buffers": _digest(path)}
    loaded.store.commit({LOADING: note})
    forget(loaded.store, all_but=path)


def forget(store: Store, all_but: Path | None = None) -> None:
    """Remove what earlier commits of a load have left beside the store's own files."""
    for path in (store.folders[0] / OWNER_FOLDER).glob("loading-*.safetensors"):
        if path != all_but:
            path.unlink()


def refuse_half_loaded(contents: Mapping[str, Any], folder: Path) -> None:
    """Refuse a store that holds no run yet.

    Raises:
        StorageError: its load was broken off.
    """
    note = contents.get(LOADING)
    if note is not None:
        raise StorageError(
            f"the model was still being loaded into {folder} when the run ended ({note.get('done')} of "
            f"{note.get('groups')} parts are there), so there is no training in it yet. greedysnake resume RUN goes on "
            f"with it"
        )


def _restore(store: Store, skeleton: Skeleton, note: Mapping[str, Any]) -> bool:
    """Give the model its buffers back; whether they, and all units that the note names, are as they were written."""
    try:
        path = _buffers_path(store, note["done"])
        if _digest(path) != note["buffers"]:
            return False
        saved = load_file(path)
        for name, buffer in skeleton.model.named_buffers():
            buffer.copy_(saved[name])
        units = [unit for group in unit_groups(skeleton)[: note["done"]] for unit in group]
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError):
        return False
    layouts = {unit: skeleton.layouts[unit] for unit in units}
    keys = {
        key(unit, chunk)
        for unit, layout in layouts.items()
        for chunk in range(len(layout.chunks))
        for key in (weights_key, state_key)
    }
    keys |= {frozen_key(unit, chunk) for unit, layout in layouts.items() for chunk in range(len(layout.frozen))}
    return not store.verify(keys=keys)


def _buffers_path(store: Store, done: int) -> Path:
    return store.folders[0] / OWNER_FOLDER / f"loading-{done}.safetensors"


def _digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()
