"""Whether there is memory to write samples between the steps of a run."""

from greedysnake.cli.prompts import new_token_limit
from greedysnake.cli.samples import Sampler
from greedysnake.engine.trainer import Trainer
from greedysnake.errors import MemoryBudgetError
from greedysnake.plan.model_sizes import inference_bytes
from greedysnake.units import format_bytes


def check_samples(sampler: Sampler | None, trainer: Trainer) -> None:
    """Make sure that samples fit where a step's computation is at other times, and in what the plan leaves free.

    Args:
        sampler: what is to be written; None: nothing.
        trainer: its plan made.

    Raises:
        MemoryBudgetError: they do not: activations and key/value cache take more.
        DataError: the model has too few positions for a prompt.
    """
    plan = trainer.plan
    if sampler is None or plan is None or not sampler.encoded:
        return
    longest = max(map(len, sampler.encoded))
    added = new_token_limit(sampler.encoded, sampler.tokens, trainer.skeleton.model.config)
    rows = len(sampler.encoded)
    needed = inference_bytes(trainer.skeleton, rows=rows, prompt_tokens=longest, tokens=longest + added)
    tier, setting = ("device", "device_memory") if plan.choices.separate_device else ("host", "host_memory")
    expected, budget = (
        (plan.device_bytes, plan.device_budget) if tier == "device" else (plan.host_bytes, plan.host_budget)
    )
    if budget is None:
        return
    room = budget - sum(expected.values()) + expected["computation"]
    if needed > room:
        raise MemoryBudgetError(
            f"training.sample_tokens: {added:,} new tokens for {rows} prompts of up to {longest:,} tokens need "
            f"{format_bytes(needed)} of {tier} memory for computation and the key/value cache, and the plan has "
            f"{format_bytes(max(room, 0))} for it. Lower training.sample_tokens, give fewer or shorter "
            f"training.sample_prompts, or raise engine.{setting} if there is more"
        )
