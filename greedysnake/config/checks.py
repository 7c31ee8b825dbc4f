"""Checks that look at more than one setting."""

from collections.abc import Mapping
from typing import Any

from greedysnake.config.problem import Problem, shown


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

    if present("optimizer.warmup_steps", "training.steps"):
        warmup, steps = values["optimizer.warmup_steps"], values["training.steps"]
        if warmup >= steps:
            text = f"found {shown(warmup)}; needs fewer than training.steps ({steps})"
            problems.append(Problem("optimizer.warmup_steps", text))
    return problems
