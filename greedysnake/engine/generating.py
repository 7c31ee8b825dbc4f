"""New tokens from a streamed model: transformers' own ``generate``, whose every forward is a pass over the units.

Caches, masks, positions, sampling and stop tokens are those of transformers and of the model. What differs is
that the model's forward runs in a coroutine, which pauses where a schedule brings the next unit's weights.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from greedysnake.errors import DataError, ModelError
from greedysnake.models.skeleton import Skeleton
from greedysnake.models.streaming import StreamedModel

logger = logging.getLogger(__name__)


def generate(
    model: StreamedModel,
    run_pass: Callable[[], None],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    seed: int | None = None,
    streamer: Callable[[], Any] | None = None,
    **options: Any,
) -> Tensor:
    """Prompts with the tokens that the model adds to them.

    Args:
        model: runs the units.
        run_pass: carries out a schedule that brings micro-batch 0 through all units, without gradients.
        input_ids: prompts, int64 [B, T], shorter ones padded on the left.
        attention_mask: int64 [B, T], 0 where there is padding; None: there is none.
        seed: of the random numbers that tokens are drawn with; None: torch's generator as it is. Its state is the
            same afterwards in any case.
        streamer: makes what is given each token as it comes, one of transformers' streamers.
        options: of ``transformers.GenerationConfig`` (``max_new_tokens``, ``do_sample``, ``temperature``, ...), on top
            of the model's own.

    Returns:
        int64 [B, T and more]; after a row's stop token comes padding.

    Raises:
        DataError: the prompts do not fit the model.
        ModelError: the model cannot generate.
    """
    transformer = model.skeleton.model
    if not transformer.can_generate():
        raise ModelError(f"models of type {transformer.config.model_type!r} cannot generate text")
    check_prompts(model.skeleton, input_ids, attention_mask)
    config = generation_config(model.skeleton, **options)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    model.place_parameters()

    def run(*, cached: bool) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        with _streamed_forward(model, run_pass):
            config.use_cache = cached
            try:
                sequences = transformer.generate(
                    model.on_device(input_ids),
                    attention_mask=model.on_device(attention_mask),
                    generation_config=config,
                    streamer=None if streamer is None else streamer(),
                )
            except (TypeError, ValueError) as error:
                raise _wrong_options(error) from error
        return sequences.cpu()

    with torch.random.fork_rng():
        if not config.use_cache:
            return run(cached=False)
        try:
            return run(cached=True)
        except ModelError as error:
            reason = error.__cause__ or error
            logger.warning("Each token goes through the model with all tokens before it, without a cache: %s", reason)
            return run(cached=False)


def generation_config(skeleton: Skeleton, **options: Any) -> GenerationConfig:
    """The model's own generation config with some options changed.

    Raises:
        DataError: an option is unknown, or its value makes no sense.
    """
    config = GenerationConfig.from_dict(skeleton.model.generation_config.to_dict())
    if unknown := [name for name in options if not hasattr(config, name)]:
        raise DataError(f"generation has no options {', '.join(unknown)}; see transformers.GenerationConfig")
    try:
        config.update(**options)
        config.validate()
    except (TypeError, ValueError) as error:
        raise _wrong_options(error) from error
    if options.get("max_new_tokens") is not None:
        config.max_length = None  # else transformers warns that there are two limits
    return config


def _wrong_options(error: Exception) -> DataError:
    return DataError(f"generation cannot be done like this: {error}")


def check_prompts(skeleton: Skeleton, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuse prompts that the model cannot take.

    Raises:
        DataError: what is wrong with them.
    """
    vocabulary = int(skeleton.model.config.get_text_config().vocab_size)
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64 or not input_ids.numel():
        raise DataError(
            f"prompts must be int64 [prompts, tokens] and not empty, got {input_ids.dtype} {list(input_ids.shape)}"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocabulary:
        raise DataError(
            f"the prompts' tokens lie between {int(input_ids.min())} and {int(input_ids.max())}, but the model's "
            f"vocabulary has {vocabulary} entries"
        )
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise DataError(f"attention_mask has shape {list(attention_mask.shape)}, the prompts {list(input_ids.shape)}")
    if not bool((attention_mask[:, -1] == 1).all()):
        raise DataError("prompts must be padded on the left: a row of attention_mask does not end with 1")


@contextmanager
def _streamed_forward(model: StreamedModel, run_pass: Callable[[], None]) -> Iterator[None]:
    """While it is open, the model's forward is a pass over its units, without a router's loss."""
    transformer = model.skeleton.model
    own = transformer.forward
    text = transformer.config.get_text_config()
    router_loss = getattr(text, "output_router_logits", None)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []

        def call() -> Tensor:
            outputs.append(own(*args, **kwargs))
            return outputs[0].logits

        model.begin_inference(call)
        run_pass()
        return outputs[0]

    transformer.forward = forward
    if router_loss:
        text.output_router_logits = False  # its loss needs all tokens, and a pass with a cache has the last one's
    try:
        yield
    finally:
        del transformer.forward
        if router_loss:
            text.output_router_logits = router_loss
