"""The files and folders that settings name, found from any working directory."""

from pathlib import Path
from typing import Any

from greedysnake.config.schema import RunConfig

Paths = Path | list[Path] | None
PROBED = "hardware.json"
"""Where ``greedysnake probe`` writes a machine's figures unless it is told otherwise."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The settings with every path made absolute, from the present working directory, but the run's own folder.

    What may be a name instead of a path (a model on the hub, a hardware profile) is one unless it is there.
    """
    data, model, engine = config.data, config.model, config.engine
    changes: dict[str, dict[str, Any]] = {
        "data": {
            "train": _absolute(data.train),
            "evaluation": _absolute(data.evaluation),
            "chat_template": _absolute(data.chat_template),
            "cache": _absolute(data.cache),
        },
        "model": {},
        "engine": {},
    }
    if model.path is not None and model.path.exists():
        changes["model"]["path"] = model.path.absolute()
    if model.tokenizer != "bytes" and Path(model.tokenizer).exists():
        changes["model"]["tokenizer"] = str(Path(model.tokenizer).absolute())
    if engine.storage is not None:
        changes["engine"]["storage"] = [folder.resolve() for folder in engine.storage]
    changes["engine"]["hardware"] = hardware = named_hardware(engine.hardware)
    if hardware is not None and Path(hardware).expanduser().is_file():
        changes["engine"]["hardware"] = str(Path(hardware).expanduser().resolve())
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=changed) for name, changed in changes.items()}
    )


def named_hardware(setting: str | None) -> str | None:
    """The file or profile that ``engine.hardware`` means in the present working directory; None: there is none."""
    if setting != "auto":
        return setting
    return PROBED if Path(PROBED).is_file() else None


def paths_in(value: Paths) -> list[Path]:
    """The paths of a setting that takes none, one or several."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _absolute(value: Paths) -> Paths:
    return [path.absolute() for path in value] if isinstance(value, list) else value and value.absolute()
