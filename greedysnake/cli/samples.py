"""Texts that a model in training writes now and then, so that a person sees what it has learnt."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from greedysnake.cli.prompts import complete, encode_prompts, new_token_limit
from greedysnake.config import RunConfig
from greedysnake.engine.trainer import Trainer
from greedysnake.errors import DataError, ModelError
from greedysnake.report.metrics import MetricsFile, cut_metrics, metrics_until

SAMPLES_NAME = "samples.jsonl"


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Completes the prompts of ``training.sample_prompts``.

    Attributes:
        tokenizer: of the model.
        prompts, encoded: texts and their tokens; none: nothing is ever written.
        every: steps between samples.
        tokens: most tokens added to each prompt.
        seed: of the random numbers, where the model's generation config draws any.
        path: file that samples are appended to, a line a prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: tuple[str, ...]
    encoded: tuple[tuple[int, ...], ...]
    every: int
    tokens: int
    seed: int
    path: Path

    @classmethod
    def of(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> "Sampler | None":
        """What ``config`` asks for; None where that is nothing.

        Raises:
            DataError: a prompt has no tokens.
        """
        training = config.training
        if training.sample_every is None:
            return None
        chat = config.data.format == "chat"
        return cls(
            tokenizer=tokenizer,
            prompts=tuple(training.sample_prompts),
            encoded=tuple(map(tuple, encode_prompts(tokenizer, training.sample_prompts, chat=chat))),
            every=training.sample_every,
            tokens=training.sample_tokens,
            seed=config.seed,
            path=config.run / SAMPLES_NAME,
        )

    def due(self, step: int, last: int) -> bool:
        """Whether samples are written after ``step`` of ``last`` steps."""
        return step % self.every == 0 or step == last

    def catch_up(self, trainer: Trainer, last: int, say: Callable[[str], None]) -> None:
        """After a kill between a snapshot and the samples of its step, write what is lacking of them."""
        step = trainer.steps_done
        written = sum(line.get("step") == step for line in metrics_until(self.path, step))
        if self.due(step, last) and written < len(self.prompts):
            cut_metrics(self.path, step - 1)
            self.write(trainer, say)

    def write(self, trainer: Trainer, say: Callable[[str], None]) -> None:
        """Complete the prompts with the model as it is now; nothing of the training changes."""
        model = trainer.skeleton.model
        try:
            completions = complete(
                trainer.generate,
                self.tokenizer,
                model.generation_config,
                self.prompts,
                self.encoded,
                seed=self.seed,
                max_new_tokens=new_token_limit(self.encoded, self.tokens, model.config),
            )
        except (DataError, ModelError) as error:  # training is what matters
            say(f"step {trainer.steps_done}: no samples: {error}")
            return
        with MetricsFile(self.path) as file:
            for completion in completions:
                file.write({"step": trainer.steps_done, **completion.as_json()})
                say(f"step {trainer.steps_done}: {completion.prompt!r} -> {completion.text!r}")
