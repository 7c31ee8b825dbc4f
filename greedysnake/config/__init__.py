"""The settings of a run: schema, loading with every mistake named at once, and the reference of all keys."""

from greedysnake.config.inputs import DataConfig, ModelConfig
from greedysnake.config.learning import OptimizerConfig, TrainingConfig
from greedysnake.config.load import dump_config, load_config
from greedysnake.config.places import PROBED, named_hardware, paths_in, with_absolute_paths
from greedysnake.config.reference import reference_markdown
from greedysnake.config.running import EngineConfig
from greedysnake.config.schema import RunConfig
from greedysnake.config.suggest import suggest

__all__ = [
    "PROBED",
    "DataConfig",
    "EngineConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainingConfig",
    "dump_config",
    "load_config",
    "named_hardware",
    "paths_in",
    "reference_markdown",
    "suggest",
    "with_absolute_paths",
]
