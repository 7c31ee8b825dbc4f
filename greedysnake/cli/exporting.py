"""A finished (or killed) run's model, written as an ordinary model folder."""

from pathlib import Path
from typing import Any

from greedysnake.cli.resuming import TOKENIZER_FOLDER, run_config
from greedysnake.data import load_tokenizer
from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import read_unit_weights
from greedysnake.models.export import export_model


def export_run(run: Path, out: Path) -> dict[str, Any]:
    """Write the model of a run, a unit at a time, with its tokenizer.

    Returns:
        ``steps_done`` at the last snapshot, and ``folder``.

    Raises:
        ConfigError: ``run`` is not a run folder.
        StorageError: its store cannot be read, or the run is still going.
        ModelError: ``out`` exists or cannot be written.
    """
    store, skeleton, contents = open_committed(run_config(run).storage_folders)
    try:
        layouts = skeleton.layouts
        export_model(skeleton, lambda unit: read_unit_weights(store, unit, layouts[unit]), out)
    finally:
        store.close()
    if (run / TOKENIZER_FOLDER).is_dir():
        load_tokenizer(run / TOKENIZER_FOLDER).save_pretrained(out)
    return {
        "folder": str(out),
        "steps_done": contents["progress"]["steps_done"],
    }
