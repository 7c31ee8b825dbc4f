"""Prompts as text: to tokens, through a model, and back to text."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from greedysnake.errors import ConfigError, DataError
from greedysnake.models.positions import max_positions

STOP = "stop"
LENGTH = "length"


class Generates(Protocol):
    """What :meth:`greedysnake.Trainer.generate` does."""

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, seed: int | None = None, **options: Any
    ) -> Tensor:
        """Prompts [B, T] with the tokens that follow."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a model added to a prompt.

    Attributes:
        prompt: as given.
        text: what was added, without special tokens.
        token_ids: of it, a stop token included.
        ended_by: ``"stop"`` by a stop token, or ``"length"``.
    """

    prompt: str
    text: str
    token_ids: list[int]
    ended_by: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: one a line; in a ``.jsonl`` file a string or an object with ``prompt`` a line.

    Raises:
        ConfigError: the file cannot be read, or has no prompts.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--prompt-file: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompt-file: {path} cannot be read: it is not text in UTF-8 (byte {error.start}); name one with "
            f"a prompt a line"
        ) from error
    # not splitlines(): it would also cut at characters that a JSON string may hold
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    structured = path.suffix == ".jsonl"
    prompts = [_prompt_of(line, f"{path}, line {number}") if structured else line for number, line in lines]
    if not prompts:
        raise ConfigError(f"--prompt-file: {path} has no prompts; write one a line")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompt-file: {where} is no JSON ({error}): {line[:80]}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'--prompt-file: {where} is neither a string nor {{"prompt": "..."}}: {line[:80]}')
    return prompt


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, chat: bool) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        tokenizer: of the model.
        prompts: texts.
        chat: whether each is what a user says, put into the tokenizer's chat template.

    Raises:
        DataError: a prompt has no tokens, or there is no chat template, or it refuses the prompt.
    """
    if chat and not tokenizer.chat_template:
        raise DataError("the model's tokenizer has no chat template, so prompts cannot be chats; leave --chat out")
    encoded = []
    for prompt in prompts:
        if chat:
            text = _chat_text(tokenizer, prompt)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        encoded.append(list(ids) or ([] if first is None else [first]))
        if not encoded[-1]:
            raise DataError(f"the prompt {prompt!r} has no tokens; give a prompt that is not empty")
    return encoded


def _chat_text(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """A prompt in the chat template, as what a user says."""
    told = [{"role": "user", "content": prompt}]
    try:
        return str(tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # whatever a template raises, or a slip in it makes jinja raise
        raise DataError(
            f"the tokenizer's chat template does not take the prompt {prompt!r} as a chat's first message: {error}. "
            f"Mend the template, or leave the chat out and give the prompt as the template would write it"
        ) from error


def new_token_limit(encoded: Sequence[Sequence[int]], asked: int, config: PretrainedConfig) -> int:
    """How many tokens can be added, at most as many as asked for: the model has so many positions.

    Raises:
        DataError: there is no room for a single one.
    """
    positions = max_positions(config)
    longest = max(map(len, encoded))
    if positions is None:
        return asked
    if longest >= positions:
        raise DataError(f"a prompt has {longest} tokens, and the model has {positions} positions; give shorter prompts")
    return min(asked, positions - longest)


def complete(
    generate: Generates,
    tokenizer: PreTrainedTokenizerBase,
    config: GenerationConfig,
    prompts: Sequence[str],
    encoded: Sequence[Sequence[int]],
    *,
    seed: int | None = None,
    **options: Any,
) -> list[Completion]:
    """What the model adds to each prompt, all at once.

    Args:
        generate: runs the model.
        tokenizer: of the model.
        config: the model's generation config, which names stop tokens; where it does not, the tokenizer's end of
            text is the one.
        prompts, encoded: texts and their tokens.
        seed, options: as for ``generate``.
    """
    stops = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    stop_ids = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    padding = next((id_ for id_ in (config.pad_token_id, tokenizer.pad_token_id, *stop_ids) if id_ is not None), 0)
    input_ids, mask = _padded(encoded, padding)
    sequences = generate(
        input_ids, mask, seed=seed, **{"eos_token_id": stop_ids or None, "pad_token_id": padding, **options}
    )
    completions = []
    for prompt, row in zip(prompts, sequences[:, input_ids.shape[1] :].tolist(), strict=True):
        end = next((index for index, id_ in enumerate(row) if id_ in stop_ids), None)
        ids = row if end is None else row[: end + 1]
        completions.append(
            Completion(
                prompt=prompt,
                text=str(tokenizer.decode(ids, skip_special_tokens=True)),
                token_ids=ids,
                ended_by=LENGTH if end is None else STOP,
            )
        )
    return completions


def _padded(encoded: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Prompts [B, T] padded on the left, and their attention mask."""
    longest = max(map(len, encoded))
    input_ids = torch.full((len(encoded), longest), padding)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(encoded):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        mask[row, longest - len(ids) :] = 1
    return input_ids, mask
