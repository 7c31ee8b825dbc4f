"""The model that a run's settings speak of."""

from transformers import AutoConfig, PretrainedConfig

from greedysnake.config import RunConfig
from greedysnake.engine.opening import config_of
from greedysnake.models.lora import Lora


def config_from_settings(settings: RunConfig) -> PretrainedConfig:
    """The transformers config that ``model.config`` describes, for a model with random weights."""
    values = dict(settings.model.config or {})
    return AutoConfig.for_model(values.pop("model_type"), **values)


def model_config(settings: RunConfig) -> PretrainedConfig:
    """The transformers config of the model folder or of ``model.config``.

    Raises:
        ModelError: the folder is missing, broken or refused.
    """
    if settings.model.path is None:
        return config_from_settings(settings)
    return config_of(settings.model.path, trust_remote_code=settings.model.trust_remote_code)


def lora_of(settings: RunConfig) -> Lora | None:
    """The adapters to train; None: the model's own parameters."""
    return None if settings.lora is None else Lora(**settings.lora.model_dump())
