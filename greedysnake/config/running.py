"""The settings of how the work is done and what is told of it."""

from typing import Annotated, Literal

from pydantic import Field

from greedysnake.config.section import Section
from greedysnake.config.values import (
    LARGEST_INT,
    Count,
    Flag,
    Share,
    Size,
    StorageFolders,
    Text,
    WandbMapping,
)


class EngineConfig(Section):
    """How the work is laid out in time, and where bytes are kept. What is learned stays the same.

    The snake and groups alone change the order in which micro-batches are summed, and so the rounding.
    """

    schedule: Literal["vertical", "horizontal"] = Field(
        default="vertical",
        description="`vertical`: all micro-batches of a step pass a layer before the next layer begins. "
        "`horizontal`: one micro-batch after another, the baseline.",
    )
    group_size: Count | None = Field(
        default=None,
        description="Micro-batches that pass the layers together, forward and backward, before the next ones begin, in "
        "the vertical schedule. Fewer than all need less memory for activations, and read all weights once more in "
        "each direction for each group. null: planned; by the rule all. With `snake`, another size sums micro-batches "
        "in another order, and so rounds differently; what was planned stays for the whole run.",
    )
    delayed_share: Share | None = Field(
        default=None,
        description="Share of each layer's optimizer step that runs behind the next forward pass (α); null: planned.",
    )
    hardware: Text | None = Field(
        default="auto",
        description="Figures of this machine, from which what is null below is planned and a step's time is predicted: "
        "a file that `greedysnake probe` wrote, or the name of a shipped profile. `auto`: `hardware.json` in the "
        "working directory, where `probe` puts it; if it is not there, and with null, a rule decides.",
        examples=["hardware.json"],
    )
    layers_per_unit: Count | None = Field(
        default=1,
        description="Decoder layers that are loaded and computed as one unit; null: planned, by the rule 1. "
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
    matrix_products: Literal["auto", "native", "float32"] = Field(
        default="auto",
        description="How the CPU multiplies matrices of bfloat16 and float16. `native`: by torch's own kernels, dozens "
        "of times slower than in float32 on a processor without instructions for the type, such as AVX-512 or AMX "
        "for bfloat16. `float32`: converted to float32, multiplied, and rounded once. `auto`: the latter on such a "
        "processor.",
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
    split_master: Flag = Field(
        default=True,
        description="Whether a bfloat16 weight is the upper half of its float32 master. false stores whole masters "
        "beside the weights, which learns the same and reads and writes 2 B a parameter more each, for comparison.",
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
