"""A corpus as one row of token ids on disk."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from greedysnake.data.files import FileSurvey
from greedysnake.data.sources import documents_fingerprint, load_documents
from greedysnake.data.tokenizer import token_id_bound
from greedysnake.errors import DataError
from greedysnake.units import format_bytes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_LAYOUT = 1
"""Part of every file's name; raise it when what the files hold changes."""
_CHARACTERS_PER_CALL = 2**20
_DIGEST_BLOCK_BYTES = 2**24

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Token ids on disk, all documents one after another, and what is known of them."""

    path: Path
    dtype: str
    """``<u2`` or ``<u4``, as numpy writes it."""
    tokens: int
    documents: int
    largest_token: int
    digest: str
    """BLAKE2 of the bytes of the file."""

    def open(self) -> np.ndarray:
        """The ids [tokens], mapped from the file and not read yet."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))


def tokenise_files(
    survey: FileSurvey, *, tokenizer: "PreTrainedTokenizerBase", text_field: str, cache_dir: Path
) -> TokenFile:
    """The tokens of the files in ``survey``, as `write_tokens` makes them, in a file under ``cache_dir``.

    A file made before from the same contents with the same tokenizer is checked against its digest and used
    again. Processes that ask for the same file at the same time wait for the one that writes it.

    Raises:
        DataError: a file has no usable text (see `load_documents`), or ``cache_dir`` cannot be written.
    """
    documents_key = documents_fingerprint(survey, text_field=text_field)
    key = hashlib.blake2b(
        repr((_LAYOUT, documents_key, _tokenizer_digest(tokenizer))).encode(), digest_size=12
    ).hexdigest()
    path = cache_dir / f"tokens-{key}.bin"
    # A copy of the text that is only needed until its tokens are written.
    scratch = cache_dir / f"documents-{key}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _only_process(path.with_suffix(".lock")):
            found = _read_token_file(path)
            if found is not None:
                return found
            logger.info("tokenising %s in %d files", format_bytes(survey.size_bytes), len(survey.files))
            documents = load_documents(survey, text_field=text_field, cache_dir=scratch)
            written = write_tokens(documents, tokenizer, path)
            del documents
            shutil.rmtree(scratch)
            return written
    except OSError as error:
        raise DataError(
            f"{cache_dir}: the tokens cannot be kept there ({error}); free some space (up to "
            f"{format_bytes(5 * survey.size_bytes)} may be needed), change its permissions, or choose another cache "
            "folder"
        ) from error


def write_tokens(documents: "Dataset", tokenizer: "PreTrainedTokenizerBase", path: Path) -> TokenFile:
    """Write the tokens of ``documents`` (rows as of `load_documents`) to ``path``, a description beside it.

    A document begins with the begin-of-text token if the tokenizer puts one at the beginning of texts, and
    always ends with the end-of-text token; no other special tokens are added. Special tokens that a text
    spells out become these tokens, as transformers has it. ``path`` appears whole or not at all.
    """
    dtype = np.dtype("<u2" if token_id_bound(tokenizer) <= 2**16 else "<u4")
    begin = _begin_tokens(tokenizer)
    end = _end_tokens(tokenizer)
    hasher = hashlib.blake2b(digest_size=16)
    tokens, largest, last_document = 0, -1, -1
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:

        def write(ids: Iterable[int]) -> None:
            nonlocal tokens, largest
            block = np.asarray(ids, dtype=dtype)
            if block.size:
                tokens, largest = tokens + block.size, max(largest, int(block.max()))
                hasher.update(block.data)
                file.write(block.data)

        for numbers, texts in _batches(documents):
            encoded = tokenizer(
                texts,
                add_special_tokens=False,
                # Whatever the tokenizer's own files say: training needs every token, and none besides.
                padding=False,
                truncation=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for number, ids in zip(numbers, encoded["input_ids"], strict=True):
                if number != last_document:
                    write(end if last_document >= 0 else ())
                    write(begin)
                    last_document = number
                write(ids)
        write(end if last_document >= 0 else ())
        file.flush()
        os.fsync(file.fileno())
    written = TokenFile(
        path=path,
        dtype=dtype.str,
        tokens=tokens,
        documents=last_document + 1,
        largest_token=largest,
        digest=hasher.hexdigest(),
    )
    unfinished.replace(path)
    # Last: a description without its tokens could be taken for the description of other ones.
    description = {name: value for name, value in asdict(written).items() if name != "path"}
    path.with_suffix(".json").write_text(json.dumps(description) + "\n", encoding="utf-8")
    return written


def _read_token_file(path: Path) -> TokenFile | None:
    """The file written earlier at ``path``, if it is there and its bytes are what was written."""
    try:
        description = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        found = TokenFile(path=path, **description)
        hasher = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            while block := file.read(_DIGEST_BLOCK_BYTES):
                hasher.update(block)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        logger.warning("%s: its description is damaged; the corpus is tokenised again", path)
        return None
    if hasher.hexdigest() != found.digest:
        logger.warning("%s: its bytes are not those once written; the corpus is tokenised again", path)
        return None
    return found


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


def _begin_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    bos = tokenizer.bos_token_id
    around_nothing = tokenizer("")["input_ids"]
    return (bos,) if bos is not None and list(around_nothing[:1]) == [bos] else ()


def _end_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    for id_ in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if id_ is not None:
            return (id_,)
    logger.warning("the tokenizer has no end-of-text token: documents follow each other without a mark between them")
    return ()


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
