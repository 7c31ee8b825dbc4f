"""Documents out of plain text and out of records with text, as a dataset on disk."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greedysnake.data.files import FileSurvey, SourceFile
from greedysnake.data.formats import RecordFormat, missing_fields
from greedysnake.data.records import Problems, Record, json_kind, open_text, read_records, text_problem
from greedysnake.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

PIECE_CHARACTERS = 2**14
"""Longer documents are kept, and later tokenised, in pieces: a tokenizer needs about 100 bytes a token, and more
time a token the longer the text."""

_ROWS_PER_WRITE = 256


def load_documents(
    survey: FileSurvey, *, text_field: str = "text", cache_dir: Path, piece_characters: int = PIECE_CHARACTERS
) -> "Dataset":
    """The documents of the files in ``survey``, in order, in an Arrow file under ``cache_dir``.

    Each record (a line of JSON, a row of a table) is a document, and so is every other file. A row is a piece of
    a document of at most ``piece_characters`` characters: ``document`` (int64, counted from 0 without gaps) and
    ``text``. The pieces of a document follow each other and together are exactly its text, less a byte order
    mark. Documents with nothing but white space are left out. What an earlier call left under ``cache_dir``
    for files with the same content is used again.

    Raises:
        DataError: records without text in ``text_field``, many at once, or no file has any text.
    """
    import datasets

    features = datasets.Features({"document": datasets.Value("int64"), "text": datasets.Value("large_string")})

    def rows() -> Iterator[dict[str, Any]]:
        return _rows(survey, text_field, piece_characters)

    try:
        with _no_progress_bars():
            return datasets.Dataset.from_generator(
                rows,
                features=features,
                cache_dir=str(cache_dir),
                # Given, so that the cache is keyed by what the files hold and nothing is pickled to find a
                # key.
                fingerprint=documents_fingerprint(survey, text_field=text_field, piece_characters=piece_characters),
                writer_batch_size=_ROWS_PER_WRITE,
            )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise


def documents_fingerprint(
    survey: FileSurvey, *, text_field: str = "text", piece_characters: int = PIECE_CHARACTERS
) -> str:
    """A digest of everything that decides the rows of `load_documents`; where the files lie does not."""
    contents = [(file.digest, file.kind) for file in survey.files]
    return hashlib.blake2b(repr((contents, text_field, piece_characters)).encode(), digest_size=16).hexdigest()


def _rows(survey: FileSurvey, text_field: str, piece_characters: int) -> Iterator[dict[str, Any]]:
    document = 0
    problems = Problems()
    for file in survey.files:
        for blocks in _documents(file, text_field, piece_characters, problems):
            # Whether a document has any text shows only as it is read: white space is held back until then.
            blank: list[str] = []
            begun = False
            for piece in cut_into_pieces(blocks, piece_characters):
                if not begun and not piece.strip():
                    blank.append(piece)
                    continue
                for text in (*blank, piece):
                    yield {"document": document, "text": text}
                blank.clear()
                begun = True
            document += begun
    problems.settle()
    if not document:
        names = ", ".join(str(file.path) for file in survey.files[:3])
        raise DataError(f"{names}: every document is empty; name files with text")


def _documents(file: SourceFile, text_field: str, block_characters: int, problems: Problems) -> Iterator[Iterable[str]]:
    """Each document of ``file`` as the blocks of text that it is made of."""
    if file.kind == "text":
        yield _text_blocks(file.path, block_characters)
        return
    wanted = RecordFormat(format="text", text_field=text_field)
    for record in read_records(file, problems, example=wanted.example("text"), columns=(text_field,)):
        problem = _wrong_text(record, wanted)
        if problem is not None:
            problems.add(problem)
        elif not problems:  # after the first problem, nothing comes of the data but more problems
            text = record.fields[text_field]
            yield (text[at : at + block_characters] for at in range(0, len(text), block_characters))


def _text_blocks(path: Path, block_characters: int) -> Iterator[str]:
    # newline="": line ends are part of the text and stay what they are.
    with open_text(path, newline="") as file:
        while block := file.read(block_characters):
            yield block


def _wrong_text(record: Record, wanted: RecordFormat) -> str | None:
    """What is wrong with a record that should hold text."""
    if problem := missing_fields(record, "text", wanted):
        return problem
    text = record.fields[wanted.text_field]
    place = f"{record.place}: field {wanted.text_field!r}"
    if not isinstance(text, str):
        return f"{place} holds {json_kind(text)}, text is needed; set text_field to a field with text, or mend the line"
    problem = text_problem(text)
    return None if problem is None else f"{place} {problem}"


def cut_into_pieces(blocks: Iterable[str], limit: int) -> Iterator[str]:
    """The text of ``blocks`` again, in pieces of at most ``limit`` characters, cut where tokens end."""
    held = ""
    for block in blocks:
        held += block
        while len(held) > limit:
            cut = _cut_point(held, limit)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _cut_point(text: str, limit: int) -> int:
    """The best place, in 1..limit, to cut ``text``, which is longer than ``limit``.

    After a line end between two characters that are no white space, or else before a space between two such: the
    usual tokenizers never merge across either. Then after any line end, then anywhere.
    """
    for mark, beyond in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, 1, limit)
        while at > 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                return at + beyond
            at = text.rfind(mark, 1, at)
    at = text.rfind("\n", 0, limit)
    return at + 1 if at >= 0 else limit


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep `datasets` from drawing over the live line, and leave its setting as it was."""
    import datasets

    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
