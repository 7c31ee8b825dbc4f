"""The settings of what is trained, and on what."""

import os
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from greedysnake.config.section import Section
from greedysnake.config.values import (
    LARGEST_INT,
    Count,
    FilePath,
    FilePaths,
    Flag,
    HalfShare,
    PlainMapping,
    Text,
)


def _tokenizer(value: object, info: ValidationInfo) -> object:
    """By default the tokenizer of the model folder, or the one of bytes where there is no folder."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    if value is not None:
        return value
    path = (info.data or {}).get("path")
    return "bytes" if path is None else str(path)


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
