"""Checks that look at more than one setting."""

from collections.abc import Mapping
from typing import Any

from greedysnake.config.problem import Problem, shown

LENGTHS = ("steps", "epochs", "tokens")
"""Keys of `training` that say how long to train, of which exactly one is given."""


def cross_problems(values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong between settings that are each right.

    Args:
        values: Valid settings, defaults included, by dotted key. A setting that is itself wrong is absent,
            and the checks that need it are passed over.
    """
    problems = []

    def present(*keys: str) -> bool:
        return all(key in values for key in keys)

    if present("model.path", "model.config"):
        path, config = values["model.path"], values["model.config"]
        if path is not None and config is not None:
            problems.append(Problem("model", "path and config are both given; keep one of them"))
        if path is None and config is None:
            text = "missing; write path: <model folder>, or config: {model_type: llama} for random weights"
            problems.append(Problem("model", text))

    if values.get("model.config") is not None and "model_type" not in values["model.config"]:
        problems.append(Problem("model.config.model_type", "missing; write model_type: llama under model.config"))

    if values.get("model.resize_embeddings") and present("model.path") and values["model.path"] is None:
        text = "needs model.path; a model with random weights has as many rows as model.config.vocab_size says"
        problems.append(Problem("model.resize_embeddings", text))

    if present("data.evaluation", "data.eval_share"):
        evaluation, share = values["data.evaluation"], values["data.eval_share"]
        if evaluation is not None and share > 0:
            text = f"found {share}, but data.evaluation is given too; keep one of them"
            problems.append(Problem("data.eval_share", text))
        every = values.get("training.eval_every")
        if every is not None and evaluation is None and share == 0:
            text = f"found {every}, but there is no evaluation data; set data.evaluation or data.eval_share"
            problems.append(Problem("training.eval_every", text))

        if values.get("training.keep_best") and evaluation is None and share == 0:
            text = "found true, but there is no evaluation data; set data.evaluation or data.eval_share"
            problems.append(Problem("training.keep_best", text))

    shares = [values.get(f"engine.boundaries_on_{tier}") or 0.0 for tier in ("device", "ssd")]
    if sum(shares) > 1 + 1e-9:
        text = f"found {shares[0]:g}, and engine.boundaries_on_ssd is {shares[1]:g}; needs at most 1 together"
        problems.append(Problem("engine.boundaries_on_device", text))

    if values.get("engine.matrix_products") == "float32" and values.get("engine.device") == "cuda":
        text = "found float32, which is for the CPU, but engine.device is cuda; needs auto or native"
        problems.append(Problem("engine.matrix_products", text))

    if values.get("training.freeze") is not None and "lora.r" in values:
        text = "given with lora, which freezes everything but its adapters; keep one of them"
        problems.append(Problem("training.freeze", text))
    if present("training.sample_every", "training.sample_prompts"):
        every, prompts = values["training.sample_every"], values["training.sample_prompts"]
        if every is not None and not prompts:
            text = f"found {every}, but there are no prompts; set training.sample_prompts"
            problems.append(Problem("training.sample_every", text))

    if present("training.early_stop", "training.eval_every"):
        early_stop = values["training.early_stop"]
        if early_stop is not None and values["training.eval_every"] is None:
            text = f"found {early_stop}, but nothing is evaluated on the way; set training.eval_every"
            problems.append(Problem("training.early_stop", text))

    if present(*(f"training.{name}" for name in LENGTHS)):
        given = [name for name in LENGTHS if values[f"training.{name}"] is not None]
        if not given:
            text = "missing; write steps: 1000 (or epochs: 3, or tokens: 20M) under training:"
            problems.append(Problem("training.steps", text))
        elif len(given) > 1:
            null = " and ".join(f"training.{name}=null" for name in given[:-1])
            text = f"{' and '.join(given)} are given; keep one of them (on the command line, {null} takes one back)"
            problems.append(Problem("training", text))

    if present("optimizer.warmup_steps", "training.steps"):
        warmup, steps = values["optimizer.warmup_steps"], values["training.steps"]
        if steps is not None and warmup >= steps:
            text = f"found {shown(warmup)}; needs fewer than training.steps ({steps})"
            problems.append(Problem("optimizer.warmup_steps", text))
    return problems
