"""Text from a run's model or a model folder, however large the model is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TextStreamer

from greedysnake.cli.prompts import Completion, complete, encode_prompts, new_token_limit
from greedysnake.cli.resuming import TOKENIZER_FOLDER, run_config
from greedysnake.config import RunConfig
from greedysnake.data import check_vocabulary, load_tokenizer
from greedysnake.engine.devices import device_problem
from greedysnake.engine.inference import GenerationSize, Generator
from greedysnake.engine.opening import MODEL_FOLDER
from greedysnake.errors import ConfigError, StorageError, StorageInUseError
from greedysnake.models.checkpoint import read_config
from greedysnake.units import format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What a person asked for.

    Attributes:
        max_new_tokens: most tokens added to a prompt.
        temperature, top_p, top_k: of sampling; None: the model's own.
        greedy: whether the likeliest token is taken each time; without it and the three above, the model's
            generation config decides.
        seed: of sampling.
        chat: whether prompts go into the chat template.
        tokenizer: folder of one, or ``bytes``; None: the model's own.
        host_memory: text like ``16GiB``; None: what is free, less a tenth.
        device: as for training.
        scratch: folder for a temporary copy of weights that do not fit in memory.
    """

    max_new_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    greedy: bool = False
    seed: int | None = None
    chat: bool = False
    tokenizer: str | None = None
    host_memory: str | None = None
    device: str = "auto"
    scratch: Path | None = None

    def options(self) -> dict[str, Any]:
        """Of ``transformers.GenerationConfig``.

        Raises:
            ConfigError: greedy, and a setting of sampling.
        """
        sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        if self.greedy and sampling:
            raise ConfigError(f"--greedy draws nothing, so {', '.join(sampling)} cannot be set with it")
        if sampling or self.greedy:
            return {"do_sample": bool(sampling), **sampling}
        return {}


def generate_text(
    source: Path, prompts: Sequence[str], request: GenerationRequest, console: Console, *, live: bool
) -> dict[str, Any]:
    """Complete prompts, all at once.

    Args:
        source: a run folder or a model folder.
        prompts: texts.
        request: how.
        console: told what is going on.
        live: whether the text of a single prompt is printed while it comes.

    Returns:
        ``completions``, ``seconds``, ``new_tokens``, ``tokens_per_second`` and ``ssd_read_bytes``.

    Raises:
        GreedySnakeError: what is wrong and what to change.
    """
    if not prompts:
        raise ConfigError("there is no prompt; give --prompt TEXT or --prompt-file FILE")
    options = request.options()
    if problem := device_problem(request.device):
        raise ConfigError(f"--device: {problem}")
    run = run_config(source) if (source / "config.yaml").is_file() else None
    config, tokenizer = _model_of(source, run, request.tokenizer)
    check_vocabulary(tokenizer, config.get_text_config().vocab_size, str(source))
    encoded = encode_prompts(tokenizer, prompts, chat=request.chat)
    limit = new_token_limit(encoded, request.max_new_tokens, config)
    if limit < request.max_new_tokens:
        console.print(f"At most {limit} new tokens: the model has no more positions.")
    size = GenerationSize(rows=len(encoded), prompt_tokens=max(map(len, encoded)), new_tokens=limit)
    with _open(source, run, size, request) as generator:
        console.print(_describe(generator))
        start, before = time.perf_counter(), generator.read_bytes
        completions = complete(
            generator.generate,
            tokenizer,
            generator.skeleton.model.generation_config,
            prompts,
            encoded,
            seed=request.seed,
            max_new_tokens=limit,
            **(
                {"streamer": lambda: TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)}
                if live
                else {}
            ),
            **options,
        )
        return _report(completions, time.perf_counter() - start, generator.read_bytes - before)


def _report(completions: Sequence[Completion], seconds: float, read: int) -> dict[str, Any]:
    count = sum(len(completion.token_ids) for completion in completions)
    return {
        "completions": [completion.as_json() for completion in completions],
        "new_tokens": count,
        "seconds": seconds,
        "tokens_per_second": count / seconds,
        "ssd_read_bytes": read,
    }


def _model_of(
    source: Path, run: RunConfig | None, tokenizer: str | None
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Config and tokenizer of a run's model or of a model folder."""
    folder = source if run is None else run.storage_folders[0] / MODEL_FOLDER
    if run is not None and not (folder / "config.json").is_file():
        raise StorageError(
            f"{source} has no model to read in {folder.parent}: its first one was still being loaded when it ended "
            f"(greedysnake resume {source} goes on), or its store was deleted or moved"
        )
    if run is None and not source.is_dir():
        what = "is not a folder" if source.exists() else "does not exist"
        raise ConfigError(f"{source} {what}; give a run folder or a model folder")
    if run is None and not (source / "config.json").is_file():
        adapter = (source / "adapter_config.json").is_file()
        raise ConfigError(
            f"{source} is neither a run folder (no config.yaml) nor a model folder (no config.json)"
            + ("; it holds adapters alone: export their run with --merge" if adapter else "")
        )
    own = source if run is None else source / TOKENIZER_FOLDER
    trusted = run is not None and run.model.trust_remote_code
    return read_config(folder, trust_remote_code=trusted), load_tokenizer(tokenizer or own)


def _open(source: Path, run: RunConfig | None, size: GenerationSize, request: GenerationRequest) -> Generator:
    memory = None
    if request.host_memory is not None:
        try:
            memory = parse_bytes(request.host_memory)
        except ValueError as error:
            raise ConfigError(f"--host-memory: {error}") from error
    if run is None:
        return Generator.of_folder(source, size, scratch=request.scratch, device=request.device, host_memory=memory)
    try:
        return Generator.of_run(run.storage_folders, size, device=request.device, host_memory=memory)
    except StorageInUseError as error:
        raise StorageInUseError(
            f"{source} is being trained, exported or read by another process, which holds its storage ({error}). Stop "
            f"it (Ctrl-C, once) and go on with greedysnake resume {source} afterwards; or have the run itself "
            f"generate: training.sample_every and training.sample_prompts"
        ) from error


def _describe(generator: Generator) -> str:
    units, placement = len(generator.skeleton.layouts), generator.placement
    staying = [unit for unit in range(units) if placement.resident(unit)]
    streamed = sum(generator.skeleton.layouts[unit].weight_bytes for unit in range(units) if unit not in staying)
    memory = (
        f"about {format_bytes(placement.expected_bytes)} of host memory, may use {format_bytes(placement.budget_bytes)}"
    )
    if not streamed:
        return f"All {units} units stay in memory ({memory})."
    return (
        f"{len(staying)} of {units} units stay in memory ({memory}); a token reads {format_bytes(streamed)} from SSD."
    )
