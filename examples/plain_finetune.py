"""The same fine-tuning in plain transformers and PyTorch, with the whole model in memory.

    python examples/plain_finetune.py CONFIG.yaml losses.jsonl [key=value ...]

It takes the settings and the token batches of `greedysnake train CONFIG.yaml`, and does everything else the ordinary
way. In float32 the losses that it writes, a line of JSON a step, are those in the run's metrics.jsonl.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from greedysnake.cli.data import load_run_data
from greedysnake.cli.length import planned_steps
from greedysnake.config import load_config
from greedysnake.data import load_tokenizer, use_chat_template


def main(config_file: str, out: str, *overrides: str) -> None:
    config = load_config(Path(config_file), overrides)
    settings = config.optimizer
    if config.model.path is None:
        sys.exit("model.path is needed: there is nothing to fine-tune in random weights")

    # The data: the same sequences in the same order, M micro-batches a step.
    tokenizer = load_tokenizer(config.model.tokenizer)
    if config.data.chat_template is not None:
        use_chat_template(tokenizer, config.data.chat_template)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
    model.train()
    with tempfile.TemporaryDirectory() as cache, Path(out).open("w") as lines:
        batches = load_run_data(config, tokenizer, model.config, Path(cache)).batches
        steps = planned_steps(config, batches)

        # The optimizer: weight decay for matrices, none for norms and biases.
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        decay = settings.weight_decay
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": decay},
                {"params": others, "weight_decay": decay if settings.decay_norms_and_biases else 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )

        def rate(step: int) -> float:
            """The learning rate of a step, counted from 0: a linear warm-up, then down to its final share."""
            if step < settings.warmup_steps:
                return settings.lr * (step + 1) / settings.warmup_steps
            if settings.lr_schedule == "constant":
                return settings.lr
            done = (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps)
            left = 1 - done if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
            return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)

        for step in range(steps):
            micro_batches = batches.step(step)
            # One mean over all target tokens of the step, however they are spread over its micro-batches.
            targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
            loss = 0.0
            optimizer.zero_grad()
            for batch in micro_batches:
                part = model(**batch, use_cache=False, num_items_in_batch=torch.tensor(targets)).loss
                part.backward()
                loss += part.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            line = {
                "step": step + 1,
                "loss": loss,
                "grad_norm": norm.item(),
                "lr": rate(step),
                "target_tokens": targets,
            }
            lines.write(json.dumps(line) + "\n")
            lines.flush()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
