"""The settings of what is learnt: how long, which parameters, and by which updates."""

from typing import Literal

from pydantic import Field

from greedysnake.config.section import Section
from greedysnake.config.values import (
    Betas,
    Count,
    Epochs,
    Flag,
    Integer,
    NonNegative,
    Patterns,
    Positive,
    Share,
    Targets,
    Texts,
    TokenCount,
    UnderOne,
)


class TrainingConfig(Section):
    """How long to train, and on how much at once."""

    steps: Count | None = Field(
        default=None,
        description="Optimizer updates to make. Give exactly one of `steps`, `epochs` and `tokens`.",
        examples=[1000],
    )
    epochs: Epochs | None = Field(
        default=None,
        description="Or how often to take every training sequence; 0.5 is half of them. The last step is filled up.",
    )
    tokens: TokenCount | None = Field(
        default=None,
        description="Or how many tokens to learn, such as `20M` or `1B`: those that count in the loss, without prompts "
        "and padding. The steps are as many as that takes on average over the data.",
    )
    micro_batches: Count = Field(
        default=4,
        description="Micro-batches in a step (M). Weights cross the SSD twice a step for each group of them "
        "(`engine.group_size`), however many it has.",
    )
    micro_batch_size: Count = Field(default=1, description="Sequences in a micro-batch (B), computed at once.")
    freeze: Patterns | None = Field(
        default=None,
        description="Patterns over names of parameters that are not trained, such as `model.embed_tokens.*` or "
        "`model.layers.[0-7].*`. They have no gradient and no optimizer state, and are only read from SSD; null: none.",
    )
    eval_every: Count | None = Field(
        default=None,
        description="Steps between evaluations. Needs evaluation data; null: no evaluation in between.",
    )
    eval_sequences: Count = Field(default=32, description="Most sequences used in one evaluation.")
    sample_every: Count | None = Field(
        default=None,
        description="Steps between samples: texts that the model writes, shown and added to `<run>/samples.jsonl`, "
        "also after the last step. They change nothing of the training. null: none.",
    )
    sample_prompts: Texts = Field(
        default=[],
        description="What samples go on from; with `data.format: chat`, what a user says.",
        examples=[["Once upon a time"]],
    )
    sample_tokens: Count = Field(default=64, description="Most tokens that a sample adds to its prompt.")
    early_stop: Count | None = Field(
        default=None,
        description="Evaluations in a row without a lower loss that end the run; null: none do. Needs `eval_every`.",
    )
    early_stop_min_delta: NonNegative = Field(
        default=0.0, description="By how much, for `early_stop`, a loss must be lower than the lowest before it."
    )
    keep_best: Flag = Field(
        default=False,
        description="Whether the weights of the lowest evaluation loss are kept, in `<run>/best`, for `greedysnake "
        "export --best`. Takes the disk of the weights, twice while they are replaced. Needs evaluation data.",
    )
    snapshot_every: Count | None = Field(
        default=None,
        description="Steps between snapshots, what a crash leaves; null: 1 if nothing stays in host memory, else 20.",
    )
    max_skipped_steps: Count = Field(
        default=10,
        description="Steps in a row with a non-finite loss or gradient that stop the run. "
        "Such a step changes no weights. In float16, steps that only lower the loss scale are not counted.",
    )


class LoraSection(Section):
    """Adapters (LoRA) to train instead of the model's own parameters. Left out or null: no adapters."""

    r: Count = Field(description="Rank of the adapters.", examples=[16])
    alpha: Positive = Field(description="An adapter's output is scaled by `alpha` / `r`.", examples=[32])
    dropout: UnderOne = Field(default=0.0, description="Share of the adapters' inputs that is dropped in training.")
    target_modules: Targets = Field(
        default="all-linear",
        description="Modules that get an adapter, by the end of their names, such as `[q_proj, v_proj]`. `all-linear`: "
        "every linear module but the output projection.",
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none",
        description="Biases of the model that are trained too; `lora_only`: those of the modules with adapters.",
    )
    use_rslora: Flag = Field(
        default=False, description="Whether outputs are scaled by `alpha` over the square root of `r` instead."
    )
    init: Literal["default", "gaussian"] = Field(
        default="default",
        description="First values of an adapter's first matrix: as of a linear layer, or normal with a deviation of "
        "1 / `r`. The second one is zero.",
    )


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: Positive = Field(description="Highest learning rate.", examples=["2e-5"])
    betas: Betas = Field(default=(0.9, 0.95), description="Decay of the first and second moment.")
    eps: Positive = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegative = Field(default=0.1, description="Decoupled weight decay.")
    decay_norms_and_biases: Flag = Field(
        default=False, description="Whether weight decay also applies to norm weights and biases."
    )
    max_grad_norm: Positive | None = Field(
        default=1.0,
        description="Gradients are scaled down to this global norm where it is larger; null: never.",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine",
        description="How the learning rate goes from `lr` to its final value after the warm-up.",
    )
    warmup_steps: Integer = Field(
        default=0,
        description="Steps over which the learning rate rises to `lr`. Fewer than `training.steps`.",
    )
    min_lr_ratio: Share = Field(default=0.1, description="Final learning rate as a share of `lr`.")
