"""A small chat model made on the spot, chats for it to learn, and the settings of a run on them."""

import json
from pathlib import Path

import torch
import yaml
from chat_templates import MARKED, merging_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

COUNT = 120
HELD_OUT = 24


def chats(first: int, count: int) -> list[list[dict[str, str]]]:
    """Sums of two numbers, a chat each; all different."""
    found = []
    for number in range(first, first + count):
        left, right = number // 12, number % 12
        found.append(
            [
                {"role": "user", "content": f"What is {left} plus {right}?"},
                {"role": "assistant", "content": f"The answer is {left + right}."},
            ]
        )
    return found


def write_chats(path: Path, several: list[list[dict[str, str]]]) -> Path:
    """Chats as JSON lines."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in several))
    return path


def make_model(folder: Path) -> PreTrainedTokenizerFast:
    """A model folder with random weights, a tokenizer and a chat template; gives the tokenizer."""
    texts = [message["content"] for messages in chats(0, COUNT) for message in messages]
    tokenizer = merging_tokenizer(texts, MARKED)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return tokenizer


def write_chat_config(folder: Path, **sections) -> Path:
    """Settings of a float32 run on chats, with the model and the data that it names."""
    if not (folder / "base").exists():
        make_model(folder / "base")
        write_chats(folder / "train.jsonl", chats(0, COUNT))
        write_chats(folder / "held_out.jsonl", chats(COUNT, HELD_OUT))
    settings = {
        "run": str(folder / "run"),
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "evaluation": str(folder / "held_out.jsonl"),
            "sequence_length": 64,
        },
        "training": {"steps": 100, "micro_batches": 2, "micro_batch_size": 2, "eval_every": 20},
        "optimizer": {"lr": 3e-3, "warmup_steps": 5},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values} if isinstance(values, dict) else values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
