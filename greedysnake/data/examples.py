"""Records with a part to learn (chats, prompts with completions) to token ids."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from greedysnake.data.chat import BadRecordError, ChatTemplate, checked_messages, checked_tools
from greedysnake.data.encoding import Span, begin_tokens, encode_spans, end_tokens, token_dtype
from greedysnake.data.files import FileSurvey
from greedysnake.data.formats import Format, RecordFormat, missing_fields
from greedysnake.data.records import Problems, json_kind, read_records, text_problem
from greedysnake.data.token_files import TokenFile, TokenWriter
from greedysnake.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS_PER_CALL = 2**18
_TOOLS = "tools"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A record as text, the stretches of it to learn, and token ids around it; those at the end are learnt."""

    place: str
    text: str
    spans: list[Span]
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


def write_examples(
    survey: FileSurvey, format_: Format, wanted: RecordFormat, tokenizer: "PreTrainedTokenizerBase", path: Path
) -> TokenFile:
    """Write the tokens of chats or completions to ``path``, with which of them are to be learnt.

    Raises:
        DataError: records are wrong, many named at once, or there are none.
        ModelError: the tokenizer has no chat template, or cannot tell which characters a token stands for.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            "the tokenizer is a slow one, which cannot tell the characters that a token stands for; save it as a "
            "fast tokenizer (tokenizer.json), or train on plain text"
        )
    problems = Problems()
    with TokenWriter(path, token_dtype(tokenizer), masked=True) as writer:
        count = 0
        for examples in _batches(_examples(survey, format_, wanted, tokenizer, problems)):
            encoded = encode_spans(tokenizer, [e.text for e in examples], [e.spans for e in examples])
            for example, (ids, learnt) in zip(examples, encoded, strict=True):
                writer.begin_document()
                targets = [np.zeros(len(example.begin), bool), learnt, np.ones(len(example.end), bool)]
                writer.write([*example.begin, *ids, *example.end], np.concatenate(targets))
                count += 1
        problems.settle()
        if not count:
            raise DataError(f"{survey.files[0].path}: there is no record in it; name files with records")
        return writer.finish()


def _examples(
    survey: FileSurvey,
    format_: Format,
    wanted: RecordFormat,
    tokenizer: "PreTrainedTokenizerBase",
    problems: Problems,
) -> Iterator[Example]:
    """Every good record; after the first bad one, none."""
    make = _chat_maker(tokenizer, wanted) if format_ == "chat" else _completion_maker(tokenizer, wanted)
    columns = (*wanted.fields(format_), *([_TOOLS] if format_ == "chat" else []))
    for file in survey.files:
        for record in read_records(file, problems, example=wanted.example(format_), columns=columns):
            problem = missing_fields(record, format_, wanted)
            if problem is None:
                try:
                    example = make(record.place, record.fields)
                except BadRecordError as error:
                    problem = f"{record.place}: {error}"
            if problem is not None:
                problems.add(problem)
            elif not problems:
                yield example


def _chat_maker(tokenizer: "PreTrainedTokenizerBase", wanted: RecordFormat) -> Callable[[str, dict[str, Any]], Example]:
    template = ChatTemplate(tokenizer)

    def make(place: str, fields: dict[str, Any]) -> Example:
        try:
            messages = checked_messages(fields[wanted.messages_field])
        except BadRecordError as error:
            raise BadRecordError(f"field {wanted.messages_field!r}: {error}") from error
        text, spans = template.render(messages, checked_tools(fields.get(_TOOLS)))
        return Example(place=place, text=text, spans=spans)

    return make


def _completion_maker(
    tokenizer: "PreTrainedTokenizerBase", wanted: RecordFormat
) -> Callable[[str, dict[str, Any]], Example]:
    begin, end = begin_tokens(tokenizer), end_tokens(tokenizer)
    # What the text spells out is not added again.
    begin_text, end_text = ("".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in (begin, end))

    def make(place: str, fields: dict[str, Any]) -> Example:
        prompt, completion = (_text(fields, name) for name in wanted.fields("completion"))
        if not completion.strip():
            raise BadRecordError(f"field {wanted.completion_field!r} is empty, so there is nothing to learn")
        text = prompt + completion
        return Example(
            place=place,
            text=text,
            spans=[(len(prompt), len(text))],
            begin=() if begin_text and text.startswith(begin_text) else begin,
            end=() if end_text and text.endswith(end_text) else end,
        )

    return make


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        hint = "; write conversations as messages" if isinstance(value, list) else ""
        raise BadRecordError(f"field {name!r} holds {json_kind(value)}, text is needed{hint}")
    if problem := text_problem(value):
        raise BadRecordError(f"field {name!r} {problem}")
    return value


def _batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    """As many characters as a tokenizer call should have."""
    batch: list[Example] = []
    characters = 0
    for example in examples:
        batch.append(example)
        characters += len(example.text)
        if characters >= _CHARACTERS_PER_CALL:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
