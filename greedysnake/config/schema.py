"""Every setting of a run: its name, type, limits, default and meaning.

Sections are frozen and refuse unknown keys. What ties settings of different sections together is in `checks`.
"""

from pathlib import Path
from typing import get_args

from pydantic import Field, model_validator

from greedysnake.config.checks import cross_problems
from greedysnake.config.inputs import DataConfig, ModelConfig
from greedysnake.config.learning import LoraSection, OptimizerConfig, TrainingConfig
from greedysnake.config.running import EngineConfig, LoggingConfig
from greedysnake.config.section import Section
from greedysnake.config.values import FilePath, Integer


class RunConfig(Section):
    """All settings of a training run.

    Raises:
        pydantic.ValidationError: a value or a combination of values is wrong.
    """

    run: FilePath = Field(description="Run folder to create.", examples=["runs/first"])
    seed: Integer = Field(default=0, description="Seed of random weights, of the order of the data and of dropout.")
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    engine: EngineConfig = EngineConfig()
    lora: LoraSection | None = None
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "RunConfig":
        values: dict[str, object] = {}
        for name, value in self:
            if isinstance(value, Section):
                values.update({f"{name}.{key}": inner for key, inner in value})
        problems = cross_problems(values)
        if problems:
            raise ValueError("; ".join(map(str, problems)))
        return self

    @property
    def storage_folders(self) -> list[Path]:
        """The folders for weights and optimizer state: `engine.storage`, or `<run>/store`."""
        return self.engine.storage or [self.run / "store"]


def sections() -> dict[str, type[Section]]:
    """The model of every section by its name, in order; "" is the top level."""
    found: dict[str, type[Section]] = {"": RunConfig}
    for name, field in RunConfig.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                found[name] = kind
    return found


def is_optional(section: str) -> bool:
    """Whether a section that is left out, or null, is off, and not one with its defaults."""
    return section != "" and RunConfig.model_fields[section].default is None
