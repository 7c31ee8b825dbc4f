"""What a person does with a run's storage besides training: check it, and delete it."""

from pathlib import Path
from typing import Any

from rich.console import Console

from greedysnake.cli.resuming import moving_bar, run_config
from greedysnake.engine.opening import open_committed
from greedysnake.storage import remove_store


def verify_run(run: Path, console: Console) -> dict[str, Any]:
    """Read a run's last snapshot and compare it with its checksums.

    Returns:
        ``steps_done`` of the snapshot, ``bytes`` checked, ``folders``, and ``damaged``: for each damaged piece its
        ``file``, ``offset`` and ``length`` in it, the ``chunk`` that it belongs to, and the ``reason``.

    Raises:
        ConfigError: ``run`` is not a run folder.
        StorageError: there is no snapshot, or the run is still going.
    """
    store, _, contents = open_committed(run_config(run).storage_folders)
    checked = 0
    try:
        with moving_bar(console, "Checking") as progress:

            def count(done: int, total: int) -> None:
                nonlocal checked
                checked = done
                progress(done, total)

            damages = store.verify(count)
        return {
            "steps_done": contents["progress"]["steps_done"],
            "bytes": checked,
            "folders": [str(folder) for folder in store.folders],
            "damaged": [
                {
                    "file": str(damage.path),
                    "offset": damage.offset,
                    "length": damage.length,
                    "chunk": damage.key,
                    "reason": damage.reason,
                    "message": str(damage),
                }
                for damage in damages
            ],
        }
    finally:
        store.close()


def clean_run(run: Path) -> dict[str, Any]:
    """Delete a run's storage; its folder with config, metrics and pictures stays.

    Returns:
        ``folders`` of the storage, and ``left``: files in them that are not the storage's own, and stay.

    Raises:
        ConfigError: ``run`` is not a run folder.
        StorageError: its storage is in use, is not a store, or cannot be deleted.
    """
    folders = run_config(run).storage_folders
    left = remove_store(folders)
    return {"folders": [str(folder) for folder in folders], "left": [str(path) for path in left]}
