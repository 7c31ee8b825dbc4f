"""Trainers of tiny models, and the weights that they export."""

from pathlib import Path

import torch
from architectures import small_config
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer


def trainer_for(folder: Path, name: str = "llama", **settings) -> Trainer:
    settings = {"dtype": "float32", "chunk_elements": 8192, "optimizer": AdamW(lr=1e-2), **settings}
    return Trainer(small_config(name), folder / "store", **settings)


def export(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()
