"""The data that a run's settings name, for the model that they name."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from greedysnake.config import RunConfig
from greedysnake.data import RecordFormat, TokenBatches, load_data
from greedysnake.engine.opening import DTYPES
from greedysnake.models.document_attention import DocumentAttention, find_document_attention, mask_bytes


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Token batches, and what the model makes of their masks.

    Attributes:
        batches: by step.
        mask_bytes: most bytes of attention masks that the model keeps for a micro-batch.
    """

    batches: TokenBatches
    mask_bytes: int


def load_run_data(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig, cache_dir: Path | None = None
) -> RunData:
    """The data of a run.

    Args:
        config: the run's settings.
        tokenizer: of the run.
        model_config: of its model.
        cache_dir: folder for tokens where the settings name none; None: the one in the run's folder.

    Raises:
        DataError, ModelError: what is wrong with the data, or what the model cannot do with it.
    """
    data, training = config.data, config.training
    batches = load_data(
        train=data.train,
        evaluation=data.evaluation,
        eval_share=data.eval_share,
        record_format=RecordFormat(
            format=data.format,
            text_field=data.text_field,
            messages_field=data.messages_field,
            prompt_field=data.prompt_field,
            completion_field=data.completion_field,
        ),
        packing=data.packing,
        long_documents=data.long_documents,
        tokenizer=tokenizer,
        sequence_length=data.sequence_length,
        micro_batch_size=training.micro_batch_size,
        micro_batches=training.micro_batches,
        seed=config.seed,
        cache_dir=data.cache or cache_dir or config.run / "cache",
        vocab_size=model_config.get_text_config().vocab_size,
    )
    dtype = DTYPES[config.model.dtype]
    attention = DocumentAttention(dtype=dtype)
    if batches.packed:
        attention = find_document_attention(model_config, dtype)
        batches = batches.with_attention(attention.inputs)
    masked = batches.packed or (batches.padded and training.micro_batch_size > 1)
    rows, tokens = training.micro_batch_size, data.sequence_length
    needed = mask_bytes(model_config, attention, rows, tokens) if masked else 0
    return RunData(batches=batches, mask_bytes=needed)


def describe_data(batches: TokenBatches) -> str:
    """What there is to learn, in a line or two."""
    report = batches.report
    nouns = {"text": "documents", "chat": "chats", "completion": "completions"}
    noun = nouns[report.format]
    held_out = f", {batches.evaluation_sequences:,} held out" if batches.evaluation_sequences else ""
    learnt = "" if report.format == "text" else f" ({report.targets:,} to learn in training)"
    up_to = "" if report.packing == "whole" else "up to "
    how = {
        "whole": "",
        "documents": f". Each holds whole {noun}, as many as fit, with attention kept inside each of them",
        "none": f". Each holds one of the {noun}",
    }[report.packing]
    return (
        f"Data: {report.tokens:,} tokens in {report.documents:,} {noun}{learnt}; {batches.sequences:,} sequences of "
        f"{up_to}{batches.sequence_length:,} tokens to train on{held_out}{how}"
    )
