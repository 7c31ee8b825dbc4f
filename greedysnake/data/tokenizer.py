"""Tokenizers: the built-in one, whose tokens are bytes, or a local Hugging Face tokenizer."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from greedysnake.errors import ModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
BYTES = "bytes"
"""The name of the built-in tokenizer."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)

logger = logging.getLogger(__name__)


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """A tokenizer that needs no files: a token is a byte of the UTF-8 text, and its id the byte's value.

    Two more tokens follow: ``<|endoftext|>`` (256) and ``<|pad|>`` (257). Saved into a model folder, it loads
    with ``AutoTokenizer.from_pretrained``. (For Qwen2 and Qwen3.5 models ``AutoTokenizer`` puts a Unicode
    normalisation, NFC, before it.)
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True), AddedToken(PADDING, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str | Path) -> "PreTrainedTokenizerBase":
    """The built-in byte tokenizer for ``"bytes"``, or the tokenizer in the local folder ``source``.

    Nothing is downloaded and no code of the folder is run.

    Raises:
        ModelError: the folder is missing, has no tokenizer, or has one that cannot be loaded.
    """
    if source == BYTES:
        return byte_tokenizer()
    folder = Path(source)
    advice = f"name a folder with a tokenizer, or {BYTES!r} for the built-in byte tokenizer"
    if not folder.exists():
        raise ModelError(f"{folder}: no such tokenizer folder (nothing is downloaded); {advice}")
    if not folder.is_dir():
        raise ModelError(f"{folder}: a file, not a tokenizer folder; {advice}")
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder}: no tokenizer in this folder (none of {', '.join(_TOKENIZER_FILES)}); copy the files "
            f"of the model's tokenizer into it, or {advice}"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers and tokenizers raise anything from OSError to a bare Exception for a damaged file.
        raise ModelError(
            f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {first_line(error)}); the "
            "files may be damaged, incomplete, or need code of their own: save them again with "
            f"save_pretrained, or {advice}"
        ) from error
    if not tokenizer.get_vocab():
        raise ModelError(f"{folder}: its tokenizer has no tokens; copy the complete tokenizer, or {advice}")
    return tokenizer


def use_chat_template(tokenizer: "PreTrainedTokenizerBase", path: Path) -> None:
    """Give ``tokenizer`` the chat template in the file ``path``, instead of its own if it has one.

    Raises:
        ModelError: the file cannot be read, or is empty.
    """
    try:
        template = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"data.chat_template: {path} cannot be read ({error}); name a text file with a Jinja template"
        ) from error
    if not template.strip():
        raise ModelError(f"data.chat_template: {path} is empty; write a Jinja template into it")
    tokenizer.chat_template = template


def token_id_bound(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the largest id that ``tokenizer`` can produce."""
    return max(max(tokenizer.get_vocab().values(), default=-1), *_ids_of_named_tokens(tokenizer), -1) + 1


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", vocab_size: int, model_name: str) -> None:
    """Make sure that every token id has a row in the embedding of the model, which has ``vocab_size`` rows.

    Special tokens that only a text spelling them out would produce (an image placeholder, say) may lie
    outside, with a logged warning, as some published models have them; `load_data` finds whether one does
    occur.

    Raises:
        ModelError: ordinary text, or a text's beginning, end or padding, can produce an id without a row.
    """
    added = tokenizer.added_tokens_decoder
    rare = {id_ for id_, token in added.items() if token.special} - set(_ids_of_named_tokens(tokenizer))
    outside = {token: id_ for token, id_ in tokenizer.get_vocab().items() if id_ >= vocab_size}
    needed = {token: id_ for token, id_ in outside.items() if id_ not in rare}
    if needed:
        token = max(needed, key=needed.__getitem__)
        bound = needed[token] + 1
        raise ModelError(
            f"{model_name}: the tokenizer produces ids up to {bound - 1} ({token!r}), the model's vocab_size "
            f"is {vocab_size}; use the model's own tokenizer, or a model with a vocab_size of {bound} or more"
        )
    if outside:
        logger.warning(
            "%s: special tokens from %r on have no row in the model (vocab_size %d); texts must not contain them",
            model_name,
            min(outside, key=outside.__getitem__),
            vocab_size,
        )


def _ids_of_named_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    ids = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
        tokenizer.sep_token_id,
        tokenizer.pad_token_id,
        tokenizer.cls_token_id,
        tokenizer.mask_token_id,
    )
    return tuple(id_ for id_ in ids if id_ is not None)


def _byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, with the byte's value.

    Bytes that print stand for themselves; the others, in order, get the characters from 256 on (GPT-2's
    table, which the byte-level parts of `tokenizers` have built in).
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
