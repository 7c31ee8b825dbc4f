"""The trainer that a run's settings describe."""

from collections.abc import Callable
from typing import Any

from greedysnake.cli.inputs import Inputs
from greedysnake.cli.model import lora_of
from greedysnake.cli.resuming import DATA
from greedysnake.config import RunConfig, named_hardware
from greedysnake.engine.trainer import Trainer
from greedysnake.models.layout import DEFAULT_CHUNK_ELEMENTS
from greedysnake.optim import AdamW, LearningRate
from greedysnake.plan.activations import BatchShape


def make_trainer(config: RunConfig, inputs: Inputs, progress: Callable[[int, int], None] | None = None) -> Trainer:
    """The trainer that ``config`` describes; ``progress`` is told bytes of weights loaded so far and in all."""
    return Trainer(
        inputs.model,
        config.storage_folders,
        dtype=config.model.dtype,
        seed=config.seed,
        layers_per_unit=config.engine.layers_per_unit,
        chunk_elements=config.engine.chunk_elements or DEFAULT_CHUNK_ELEMENTS,
        second_slot=config.engine.second_slot,
        split_master=config.engine.split_master,
        freeze=tuple(config.training.freeze or ()),
        lora=lora_of(config),
        trust_remote_code=config.model.trust_remote_code,
        batch=batch_shape(config, inputs),
        notes={DATA: inputs.batches.fingerprint},
        learning_rate=learning_rate(config, inputs.steps),
        progress=progress,
        vocab_size=inputs.vocab_size,
        **changeable_settings(config),
    )


def batch_shape(config: RunConfig, inputs: Inputs) -> BatchShape:
    """The sizes of a step's batch."""
    return BatchShape(
        micro_batches=config.training.micro_batches,
        rows=config.training.micro_batch_size,
        tokens=config.data.sequence_length,
        mask_bytes=inputs.mask_bytes,
    )


def learning_rate(config: RunConfig, steps: int) -> LearningRate:
    """The learning rate by step, in a run of so many."""
    optimizer = config.optimizer
    return LearningRate(
        peak=optimizer.lr,
        shape=optimizer.lr_schedule,
        steps=steps,
        warmup_steps=optimizer.warmup_steps,
        min_ratio=optimizer.min_lr_ratio,
    )


def changeable_settings(config: RunConfig) -> dict[str, Any]:
    """The trainer's settings that may be others when a run is resumed; so may its learning rate."""
    optimizer, engine, training = config.optimizer, config.engine, config.training
    return {
        "optimizer": AdamW(
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            decay_norms_and_biases=optimizer.decay_norms_and_biases,
            max_grad_norm=optimizer.max_grad_norm,
        ),
        "device": engine.device,
        "host_memory": engine.host_memory,
        "device_memory": engine.device_memory,
        "matrix_products": engine.matrix_products,
        "hardware": named_hardware(engine.hardware),
        "delayed_share": engine.delayed_share,
        "schedule": engine.schedule,
        "group_size": engine.group_size,
        "snake": engine.snake,
        "overlap": engine.overlap,
        "boundaries_on_device": engine.boundaries_on_device,
        "boundaries_on_ssd": engine.boundaries_on_ssd,
        "kept_activations": engine.kept_activations,
        "gradients": None if engine.gradients == "auto" else engine.gradients,
        "resident_weights": engine.resident_weights,
        "resident_state": engine.resident_state,
        "head_chunk_tokens": engine.head_chunk_tokens,
        "snapshot_every": training.snapshot_every,
        "max_skipped_steps": training.max_skipped_steps,
    }
