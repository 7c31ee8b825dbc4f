"""A corpus to one row of token ids on disk, once for the same contents and the same tokenizer."""

import fcntl
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greedysnake.data.encoding import begin_tokens, encode, end_tokens, token_dtype
from greedysnake.data.examples import write_examples
from greedysnake.data.files import FileSurvey
from greedysnake.data.formats import Format, RecordFormat
from greedysnake.data.sources import documents_fingerprint, load_documents
from greedysnake.data.token_files import TokenFile, TokenWriter, read_token_file
from greedysnake.errors import DataError
from greedysnake.units import format_bytes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 2
"""Part of every file's name; raise it when what the files hold changes."""
_CHARACTERS_PER_CALL = 2**20

logger = logging.getLogger(__name__)


def tokenise_files(
    survey: FileSurvey, *, tokenizer: "PreTrainedTokenizerBase", text_field: str, cache_dir: Path
) -> TokenFile:
    """The tokens of the files in ``survey``, as `write_tokens` makes them, in a file under ``cache_dir``.

    A file made before from the same contents with the same tokenizer is checked against its digest and used
    again. Processes that ask for the same file at the same time wait for the one that writes it.

    Raises:
        DataError: a file has no usable text (see `load_documents`), or ``cache_dir`` cannot be written.
    """
    key = documents_fingerprint(survey, text_field=text_field)

    def write(path: Path) -> TokenFile:
        # A copy of the text that is only needed until its tokens are written.
        scratch = path.with_name(path.stem.replace("tokens", "documents"))
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that died, which a power cut may have emptied
        try:
            documents = load_documents(survey, text_field=text_field, cache_dir=scratch)
            written = write_tokens(documents, tokenizer, path)
            del documents  # it maps the copy
            return written
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    return _once(key, survey, tokenizer, cache_dir, write)


def tokenise_examples(
    survey: FileSurvey,
    format_: Format,
    wanted: RecordFormat,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    cache_dir: Path,
) -> TokenFile:
    """The tokens of chats or completions, and which of them are to be learnt; kept as by `tokenise_files`.

    Raises:
        DataError: records are not what they should be (many are named at once), or ``cache_dir`` cannot be written.
        ModelError: the tokenizer cannot make tokens of chats.
    """
    contents = [(file.digest, file.kind) for file in survey.files]
    key = repr((contents, format_, wanted.fields(format_)))
    return _once(
        key, survey, tokenizer, cache_dir, lambda path: write_examples(survey, format_, wanted, tokenizer, path)
    )


def write_tokens(documents: "Dataset", tokenizer: "PreTrainedTokenizerBase", path: Path) -> TokenFile:
    """Write the tokens of ``documents`` (rows as of `load_documents`) to ``path``, a description beside it.

    A document begins with the begin-of-text token if the tokenizer puts one at the beginning of texts, and
    always ends with the end-of-text token; no other special tokens are added. Special tokens that a text
    spells out become these tokens, as transformers has it. ``path`` appears whole or not at all.
    """
    begin, end = begin_tokens(tokenizer), end_tokens(tokenizer)
    last_document = -1
    with TokenWriter(path, token_dtype(tokenizer)) as writer:
        for numbers, texts in _batches(documents):
            for number, ids in zip(numbers, encode(tokenizer, texts)["input_ids"], strict=True):
                if number != last_document:
                    writer.write(end if last_document >= 0 else ())
                    writer.begin_document()
                    writer.write(begin)
                    last_document = number
                writer.write(ids)
        writer.write(end if last_document >= 0 else ())
        return writer.finish()


def _once(
    contents_key: str,
    survey: FileSurvey,
    tokenizer: "PreTrainedTokenizerBase",
    cache_dir: Path,
    write: Callable[[Path], TokenFile],
) -> TokenFile:
    """The tokens that were made before of the same contents, or those that ``write`` makes now."""
    key = repr((_LAYOUT, contents_key, _tokenizer_digest(tokenizer)))
    path = cache_dir / f"tokens-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.bin"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _only_process(path.with_suffix(".lock")):
            found = read_token_file(path)
            if found is not None:
                return found
            logger.info("tokenising %s in %d files", format_bytes(survey.size_bytes), len(survey.files))
            return write(path)
    except OSError as error:
        raise DataError(
            f"{cache_dir}: the tokens cannot be kept there ({error}); free some space (up to "
            f"{format_bytes(5 * survey.size_bytes)} may be needed), change its permissions, or choose another cache "
            "folder"
        ) from error


def _batches(documents: "Dataset") -> Iterator[tuple[list[int], list[str]]]:
    """Document numbers and texts of consecutive rows, as many characters as a tokenizer call should have."""
    numbers: list[int] = []
    texts: list[str] = []
    characters = 0
    for rows in documents.iter(batch_size=64):
        for number, text in zip(rows["document"], rows["text"], strict=True):
            numbers.append(number)
            texts.append(text)
            characters += len(text)
            if characters >= _CHARACTERS_PER_CALL:
                yield numbers, texts
                numbers, texts, characters = [], [], 0
    if texts:
        yield numbers, texts


def _tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A digest of everything the tokenizer would save, whatever kind it is."""
    hasher = hashlib.blake2b(digest_size=16)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                hasher.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return hasher.hexdigest()


@contextmanager
def _only_process(lock: Path) -> Iterator[Any]:
    """Wait until no other process is in here with the same ``lock`` file; one that dies frees it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
