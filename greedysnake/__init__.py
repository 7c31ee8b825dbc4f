"""GreedySnake: full-parameter training of language models that fit in no memory, streamed from SSD.

>>> import greedysnake
>>> trainer = greedysnake.Trainer("model-folder", storage="/nvme/run")  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greedysnake.engine.results import StepResult
    from greedysnake.engine.settings import TrainerSettings
    from greedysnake.engine.trainer import Trainer
    from greedysnake.models.lora import Lora
    from greedysnake.optim import AdamW, LearningRate

__version__ = "0.1.0"
__all__ = ["AdamW", "LearningRate", "Lora", "StepResult", "Trainer", "TrainerSettings"]

_HOMES = {
    "Trainer": "greedysnake.engine.trainer",
    "StepResult": "greedysnake.engine.results",
    "TrainerSettings": "greedysnake.engine.settings",
    "Lora": "greedysnake.models.lora",
    "AdamW": "greedysnake.optim",
    "LearningRate": "greedysnake.optim",
}


def __getattr__(name: str) -> Any:
    """Public names come with torch and transformers, which load only when one is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
