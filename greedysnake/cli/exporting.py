"""A finished (or killed) run's model, written as an ordinary model folder."""

from pathlib import Path
from typing import Any

from rich.console import Console

from greedysnake.cli.folder import BEST_FOLDER
from greedysnake.cli.resuming import TOKENIZER_FOLDER, moving_bar, run_config
from greedysnake.engine.exporting import companion_files, export_options, export_store
from greedysnake.engine.opening import open_committed
from greedysnake.errors import ConfigError, ModelError
from greedysnake.models.export import DEFAULT_SHARD_BYTES


def export_run(
    run: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    merge: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write the model of a run, a unit at a time, with its tokenizer; of a run with LoRA, the adapters alone.

    Args:
        run: the run's folder.
        out: to be created; it appears when it is complete.
        dtype: ``bfloat16``, ``float16`` or ``float32``, which are the master weights; None: the run's.
        max_shard_size: most bytes of a file.
        overwrite: whether a model folder that is there is replaced.
        merge: of a run with LoRA, write the whole model, with the adapters merged into its weights.
        console: for a progress bar.

    Returns:
        ``steps_done`` at the last snapshot, ``folder``, and whether it holds an ``adapter`` alone.

    Raises:
        ConfigError: ``run`` is not a run folder, there is nothing to merge, or ``dtype`` or ``max_shard_size`` is none.
        StorageError: its store cannot be read, or the run is still going.
        ModelError: ``out`` exists or cannot be written, or the dtype cannot hold a weight.
    """
    config = run_config(run)
    folders = config.storage_folders
    check_apart(out, run, folders)
    own = run / TOKENIZER_FOLDER
    beside = companion_files(folders[0], own if own.is_dir() else None)
    with moving_bar(console, "Writing") as progress:
        options = export_options(dtype, max_shard_size, overwrite=overwrite, beside=beside, progress=progress)
        store, skeleton, contents = open_committed(folders)
        try:
            if merge and skeleton.lora is None:
                raise ConfigError(f"--merge: {run} has no LoRA adapters; without it, its whole model is written")
            base_model = contents["base_model"]
            adapter = export_store(store, skeleton, out, options, base_model=base_model, merge=merge)
        finally:
            store.close()
    if adapter and config.model.resize_embeddings and console is not None:
        console.print(
            "Note: tokens that model.resize_embeddings added to the model are not in its folder, so adapters alone do "
            "not bring them along; --merge writes the whole model."
        )
    return {
        "folder": str(out),
        "adapter": adapter,
        "steps_done": contents["progress"]["steps_done"],
    }


def check_apart(out: Path, run: Path, storage: list[Path]) -> None:
    """Refuse to write over the run itself.

    Raises:
        ModelError: ``out`` is the run's folder, or is, holds or lies in one of its storage folders or that of its best
            weights.
    """
    place, own = out.resolve(), [folder.resolve() for folder in (*storage, run / BEST_FOLDER)]
    if any(place == folder or place in folder.parents for folder in (run.resolve(), *own)) or any(
        folder in place.parents for folder in own
    ):
        raise ModelError(f"{out} is a place of the run itself. Choose another folder for the export")
