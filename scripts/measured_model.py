"""The Llama and the batch that the measuring scripts train, from their command line."""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

SIZES = ("layers", "hidden", "ffn", "heads", "kv-heads")


def add_model_arguments(parser: argparse.ArgumentParser, sizes: tuple[int, ...], *, sequence: int) -> None:
    """The folder to measure in, sizes of the model (by default ``sizes``, in the order of SIZES), and steps."""
    parser.add_argument("folder", type=Path, help="folder on the SSD to measure with; its store is removed at the end")
    for name, default in zip(SIZES, sizes, strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=sequence)
    parser.add_argument("--steps", type=int, default=2, help="steps measured, after one that is not")
    parser.add_argument("--host-memory", default=None)


def model_config(arguments: argparse.Namespace) -> PretrainedConfig:
    """The model."""
    return AutoConfig.for_model(
        "llama",
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.sequence,
    )


def random_batch(arguments: argparse.Namespace, micro_batches: int) -> list[dict[str, Tensor]]:
    """Micro-batches of one sequence of random tokens each."""
    ids = torch.randint(0, arguments.vocabulary, (micro_batches, 1, arguments.sequence))
    return [{"input_ids": part, "labels": part} for part in ids]
