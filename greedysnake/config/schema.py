"""Every setting of a run: its name, type, limits, default and meaning.

Sections are frozen and refuse unknown keys. What ties settings of different sections together is in `checks`.
"""

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from greedysnake.config.checks import cross_problems
from greedysnake.config.values import (
    LARGEST_INT,
    Betas,
    Count,
    Epochs,
    FilePath,
    FilePaths,
    Flag,
    HalfShare,
    Integer,
    NonNegative,
    Patterns,
    PlainMapping,
    Positive,
    Share,
    Size,
    StorageFolders,
    Targets,
    Text,
    Texts,
    TokenCount,
    UnderOne,
    WandbMapping,
)


def _tokenizer(value: object, info: ValidationInfo) -> object:
    """By default the tokenizer of the model folder, or the one of bytes where there is no folder."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    if value is not None:
        return value
    path = (info.data or {}).get("path")
    return "bytes" if path is None else str(path)


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ModelConfig(Section):
    """What to train. Give either `path` or `config`."""

    path: FilePath | None = Field(
        default=None,
        description="Model folder (config.json and safetensors files) whose weights training starts from, or the name "
        "of a model on the Hugging Face hub (`organisation/model`), which is downloaded to its local cache.",
    )
    config: PlainMapping | None = Field(
        default=None,
        description="A transformers config with its `model_type`, for a model with random weights. "
        "Keys that are left out keep the default of that model type.",
    )
    tokenizer: Annotated[Text, BeforeValidator(_tokenizer)] = Field(
        default=None,  # type: ignore[assignment]  # replaced by the validator
        description="`bytes` (one token a byte of UTF-8) or a folder with a tokenizer. "
        "Default: the model folder where `path` is given, else `bytes`.",
    )
    resize_embeddings: Flag | Count | None = Field(
        default=None,
        description="Rows to add to embedding and head of the model in `path` for tokens that its tokenizer has and it "
        "lacks. `true`: as many as the tokenizer needs; a number: rows in all; null or false: none. New rows start "
        "near the mean of the others.",
    )
    trust_remote_code: Flag = Field(
        default=False,
        description="Whether Python code in the model folder may be run, for models that transformers does not know. "
        "It can do anything that you can: read it first.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16",
        description="Type of weights and activations. Master weights, moments and sums of gradients are "
        "float32 in any case. `float16` is for GPUs without bfloat16: it scales the loss, its state takes 12 bytes "
        "a parameter instead of 10, and most CPUs compute in it many times slower.",
    )


class DataConfig(Section):
    """What to learn from, and how it is cut."""

    train: FilePaths = Field(
        description="Training data: a text, JSON lines or Parquet file, a folder of them or one that "
        "`datasets` saved, or a list.",
        examples=["text/"],
    )
    evaluation: FilePaths | None = Field(default=None, description="Likewise data that is only evaluated.")
    eval_share: HalfShare = Field(
        default=0.0,
        description="Share of the training data set aside for evaluation, instead of `evaluation`.",
    )
    format: Literal["auto", "text", "chat", "completion"] = Field(
        default="auto",
        description="What a record is. `text`: all of it is learnt. `chat`: messages, of which the assistant's are "
        "learnt. `completion`: a prompt and what is learnt to follow it. `auto`: told by the fields.",
    )
    text_field: Text = Field(default="text", description="Name of the field that holds the text of a record.")
    messages_field: Text = Field(
        default="messages", description="Name of the field with a chat: a list of messages with `role` and `content`."
    )
    prompt_field: Text = Field(default="prompt", description="Name of the field with a prompt.")
    completion_field: Text = Field(default="completion", description="Name of the field with a completion.")
    chat_template: FilePath | None = Field(
        default=None,
        description="File with a chat template (Jinja), instead of the tokenizer's own. It is exported with the model.",
    )
    packing: Literal["auto", "documents", "whole", "none"] = Field(
        default="auto",
        description="How documents share a sequence. `whole`: one after another, cut every `sequence_length` tokens. "
        "`documents`: as many whole ones as fit, attention kept inside each. `none`: one each, padded. "
        "`auto`: `whole` for text, `documents` for chats and completions.",
    )
    long_documents: Literal["auto", "truncate", "split", "drop"] = Field(
        default="auto",
        description="What `documents` and `none` do with a document of more than `sequence_length` tokens: cut its "
        "end off, make several of it, or leave it out. `auto`: `split` text, `truncate` others.",
    )
    sequence_length: Annotated[int, Field(strict=True, ge=2, le=LARGEST_INT)] = Field(
        description="Most tokens in a sequence (T).", examples=[1024]
    )
    cache: FilePath | None = Field(
        default=None,
        description="Folder for the data as tokens, which other runs with the same data and tokenizer can share; "
        "null: `<run>/cache`.",
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
        description="Micro-batches in a step (M). Weights cross the SSD twice a step however many there are.",
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


class EngineConfig(Section):
    """How the work is laid out in time, and where bytes are kept. What is learned stays the same.

    The snake alone changes the order in which micro-batches are summed, and so the rounding.
    """

    schedule: Literal["vertical", "horizontal"] = Field(
        default="vertical",
        description="`vertical`: all micro-batches of a step pass a layer before the next layer begins. "
        "`horizontal`: one micro-batch after another, the baseline.",
    )
    delayed_share: Share | None = Field(
        default=None,
        description="Share of each layer's optimizer step that runs behind the next forward pass (α); null: planned.",
    )
    hardware: Text | None = Field(
        default=None,
        description="Figures of this machine, from which what is null below is planned and a step's time is predicted: "
        "a file that `greedysnake probe` wrote, or the name of a shipped profile. null: a rule decides.",
        examples=["hardware.json"],
    )
    layers_per_unit: Count | None = Field(
        default=1,
        description="Decoder layers that are loaded and computed as one unit; null: planned, without `hardware` 1. "
        "With `snake`, another size sums micro-batches in another order, and so rounds differently.",
    )
    snake: Flag = Field(
        default=True,
        description="Whether every other unit takes the micro-batches in reverse order. "
        "false keeps the natural order throughout.",
    )
    overlap: Flag = Field(
        default=True,
        description="Whether I/O, copies and optimizer run while layers compute; false does one thing after another, "
        "for comparison.",
    )
    device: Literal["auto", "cpu", "cuda", "emulated"] = Field(
        default="auto",
        description="Where to compute. `auto`: the CPU, for now. `cuda`: a GPU; this path has not run on one yet. "
        "`emulated`: the CPU as if it were a slow device with its own memory, for tests.",
    )
    host_memory: Size | None = Field(
        default=None,
        description="Host memory that the run may use; null: what the machine has, less a margin.",
    )
    device_memory: Size | None = Field(
        default=None, description="The device's own memory that the run may use; null: what is free, less a tenth."
    )
    storage: StorageFolders | None = Field(
        default=None,
        description="Folders for weights and optimizer state, best one on each SSD; null: `<run>/store`.",
    )
    second_slot: Flag = Field(
        default=True,
        description="Whether the storage has two places for everything, so that a run that is killed can be resumed. "
        "false takes half the disk, and then only a run that ended in good order can.",
    )
    resident_weights: Share | None = Field(
        default=0.0,
        description="Share of all weights that stays in host memory, off the SSD between snapshots; "
        "null: as much as helps and fits.",
    )
    resident_state: Share | None = Field(
        default=0.0, description="Likewise of the optimizer's state; null: as much as helps and fits."
    )
    chunk_elements: Annotated[int, Field(strict=True, ge=4096, le=LARGEST_INT, multiple_of=4096)] | None = Field(
        default=None, description="Parameters that the optimizer updates as one chunk; null: 4 Mi."
    )
    boundaries_on_device: Share | None = Field(
        default=None,
        description="Share of the activations between units that waits for the backward pass on the device; null: as "
        "much as fits, where the device has memory of its own.",
    )
    kept_activations: Share | None = Field(
        default=None,
        description="Share of the activations inside of layers that is kept from the forward to the backward pass, "
        "where they are computed; the rest is recomputed. Each saves its layer's second forward. null: as much as "
        "helps and fits.",
    )
    boundaries_on_ssd: Share | None = Field(
        default=None,
        description="Likewise on SSD; null: what does not fit in host memory, where the rest waits.",
    )
    head_chunk_tokens: Count | None = Field(
        default=None,
        description="Tokens of a micro-batch whose logits exist at once; the head and the loss take one such part "
        "after another. null: all, unless that takes more than 1 GiB and the largest weight's gradient do, or more "
        "than an eighth of the memory configured above. Parts change the order of additions in the head's weight "
        "gradient and in the loss, and so their rounding.",
    )
    gradients: Literal["auto", "host", "ssd"] = Field(
        default="auto", description="Where gradients that wait for their update are kept."
    )


class LoggingConfig(Section):
    """Where metrics go besides `metrics.jsonl`. A run that is resumed goes on with the same curves."""

    tensorboard: Flag = Field(
        default=False,
        description="Whether to write event files for TensorBoard to `<run>/tensorboard`. Needs the extra "
        "`greedysnake[tensorboard]`.",
    )
    wandb: WandbMapping | None = Field(
        default=None,
        description="`project`, and if wanted `name` and `mode` (`online`, or `offline` for `wandb sync` later), of a "
        "run at Weights & Biases; null: none. Needs the extra `greedysnake[wandb]`.",
    )


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
