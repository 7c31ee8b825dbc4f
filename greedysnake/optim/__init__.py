"""Streamed AdamW: chunk updates, lossless master weights, exact clipping, learning rates."""

from greedysnake.optim.adamw import AdamW, ChunkUpdater, UpdateScalars
from greedysnake.optim.norm import GradientNorm, parameter_norms, total_norm
from greedysnake.optim.rates import LearningRate
from greedysnake.optim.split import join_master, split_master

__all__ = [
    "AdamW",
    "ChunkUpdater",
    "GradientNorm",
    "LearningRate",
    "UpdateScalars",
    "join_master",
    "parameter_norms",
    "split_master",
    "total_norm",
]
