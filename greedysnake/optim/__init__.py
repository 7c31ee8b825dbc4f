"""Streamed AdamW: chunk updates, master weights, exact clipping, loss scaling, learning rates."""

from greedysnake.optim.adamw import AdamW, ChunkUpdater, UpdateScalars
from greedysnake.optim.loss_scale import LossScale, LossScaling, first_scale
from greedysnake.optim.masters import read_master, write_master
from greedysnake.optim.norm import GradientNorm, parameter_norms, total_norm
from greedysnake.optim.rates import LearningRate
from greedysnake.optim.split import join_master, split_master

__all__ = [
    "AdamW",
    "ChunkUpdater",
    "GradientNorm",
    "LearningRate",
    "LossScale",
    "LossScaling",
    "UpdateScalars",
    "first_scale",
    "join_master",
    "parameter_norms",
    "read_master",
    "split_master",
    "total_norm",
    "write_master",
]
