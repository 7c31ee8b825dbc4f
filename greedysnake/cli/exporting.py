"""A finished (or killed) run's model, written as an ordinary model folder."""

from pathlib import Path
from typing import Any

from greedysnake.config import load_config
from greedysnake.data import load_tokenizer
from greedysnake.engine.opening import open_committed
from greedysnake.engine.unit_store import read_unit_weights
from greedysnake.errors import ConfigError
from greedysnake.models.export import export_model

TOKENIZER_FOLDER = "tokenizer"


def export_run(run: Path, out: Path) -> dict[str, Any]:
    """Write the model of a run, a unit at a time, with its tokenizer.

    Returns:
        ``steps_done`` at the last commit, ``updates_pending`` (whether delayed updates are missing) and ``folder``.

    Raises:
        ConfigError: ``run`` is not a run folder.
        StorageError: its store cannot be read, or the run is still going.
        ModelError: ``out`` exists or cannot be written.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run} is not a run folder: it has no config.yaml. Give the folder that 'run' named in training"
        )
    config = load_config(run / "config.yaml").model_copy(update={"run": run})  # wherever it has been moved to
    store, skeleton, contents = open_committed(config.storage_folders)
    try:
        layouts = skeleton.layouts
        export_model(skeleton, lambda unit: read_unit_weights(store, unit, layouts[unit]), out)
    finally:
        store.close()
    if (run / TOKENIZER_FOLDER).is_dir():
        load_tokenizer(run / TOKENIZER_FOLDER).save_pretrained(out)
    return {
        "folder": str(out),
        "steps_done": contents["steps_done"],
        "updates_pending": contents["updates_pending"],
    }
