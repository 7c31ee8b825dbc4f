"""A finished (or killed) run's model, written as an ordinary model folder."""

from pathlib import Path
from typing import Any

from torch import Tensor

from greedysnake.cli.resuming import TOKENIZER_FOLDER, run_config
from greedysnake.data import load_tokenizer
from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import read_unit_weights
from greedysnake.errors import ConfigError
from greedysnake.models.export import export_adapter, export_model


def export_run(run: Path, out: Path, *, merge: bool = False) -> dict[str, Any]:
    """Write the model of a run, a unit at a time, with its tokenizer; of a run with LoRA, the adapters alone.

    Args:
        run: the run folder.
        out: folder to create.
        merge: of a run with LoRA, write the whole model, with the adapters merged into its weights.

    Returns:
        ``steps_done`` at the last snapshot, ``folder``, and whether it holds an ``adapter`` alone.

    Raises:
        ConfigError: ``run`` is not a run folder, or there is nothing to merge.
        StorageError: its store cannot be read, or the run is still going.
        ModelError: ``out`` exists or cannot be written.
    """
    store, skeleton, contents = open_committed(run_config(run).storage_folders)
    try:
        if merge and skeleton.lora is None:
            raise ConfigError(f"--merge: {run} has no LoRA adapters; without it, its whole model is written")
        layouts = skeleton.layouts

        def read_unit(unit: int) -> dict[str, Tensor]:
            return read_unit_weights(store, unit, layouts[unit])

        adapter = skeleton.lora is not None and not merge
        if adapter:
            export_adapter(skeleton, read_unit, out, contents["base_model"])
        else:
            export_model(skeleton, read_unit, out)
    finally:
        store.close()
    if (run / TOKENIZER_FOLDER).is_dir():
        load_tokenizer(run / TOKENIZER_FOLDER).save_pretrained(out)
    return {
        "folder": str(out),
        "adapter": adapter,
        "steps_done": contents["progress"]["steps_done"],
    }
