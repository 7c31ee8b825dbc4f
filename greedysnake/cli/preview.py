"""What a step of training would see: its sequences as text, and which tokens of it are learnt."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from greedysnake.cli.data import describe_data
from greedysnake.cli.inputs import Inputs, prepare_inputs
from greedysnake.config import RunConfig
from greedysnake.data.rows import Row

_SHOWN_CHARACTERS = 600
_LEARNT_STYLE = "bold green"
_NOUNS = {"text": "document", "chat": "chat", "completion": "completion"}


def describe_preview(config: RunConfig, step: int) -> dict[str, Any]:
    """Everything about a step's data, as plain values.

    Returns:
        ``step``; ``data``: counts over all training data; ``tokens``, ``learnt`` and ``padding`` of the step; and
        ``micro_batches``, each a list of sequences with the same counts and their ``documents``, whose ``parts`` are
        text with ``learnt``, whether it counts in the loss.

    Raises:
        GreedySnakeError: what is wrong with the settings, the model or the data.
    """
    with _inputs(config) as inputs:
        batches = inputs.batches
        micro_batches = []
        for rows in batches.rows(step):
            longest = max(len(row.ids) for row in rows)
            micro_batches.append([_describe_row(row, longest, inputs) for row in rows])
        sequences = [sequence for micro_batch in micro_batches for sequence in micro_batch]
        report = asdict(batches.report)
        cut = report.pop("cut")
        return {
            "step": step,
            "data": {
                **{name: list(map(str, v)) if isinstance(v, tuple) else v for name, v in report.items()},
                **{name: count for name, count in cut.items() if name not in report},
                "sequences": batches.sequences,
                "evaluation_sequences": batches.evaluation_sequences,
                "steps_per_epoch": batches.steps_per_epoch,
            },
            **{name: sum(sequence[name] for sequence in sequences) for name in ("tokens", "learnt", "padding")},
            "micro_batches": micro_batches,
        }


def show_preview(config: RunConfig, step: int, console: Console, *, most_rows: int | None, full: bool) -> None:
    """The same for a person to read; learnt text in colour, or in brackets where there is none.

    Args:
        config: settings of the run.
        step: which step, counted from 0.
        console: to print to.
        most_rows: sequences to show; None: all.
        full: whether long texts are shown to their end.

    Raises:
        GreedySnakeError: as `describe_preview`.
    """
    coloured = console.is_terminal and not console.no_color
    with _inputs(config) as inputs:
        batches = inputs.batches
        console.print(describe_data(batches))
        micro_batches = batches.rows(step)
        rows = [row for rows in micro_batches for row in rows]
        tokens, learnt = sum(len(row.ids) for row in rows), sum(int(row.learnt.sum()) for row in rows)
        padding = sum(max(len(row.ids) for row in part) * len(part) for part in micro_batches) - tokens
        console.print(
            f"Step {step}: {_count(len(micro_batches), 'micro-batch', 'es')} of {batches.micro_batch_size}, "
            f"{_count(tokens, 'token')}, {learnt:,} learnt, {padding:,} padding."
        )
        marks = Text("green", style=_LEARNT_STYLE) if coloured else Text("in [[ ]]")
        console.print(Text("What is learnt is shown ").append_text(marks).append("."))
        shown = 0
        for number, part in enumerate(micro_batches, start=1):
            longest = max(len(row.ids) for row in part)
            for place, row in enumerate(part, start=1):
                if most_rows is not None and shown == most_rows:
                    left = len(rows) - shown
                    console.print(f"\n{_count(left, 'more sequence')} in this step; --rows 0 shows all.")
                    return
                shown += 1
                described = _describe_row(row, longest, inputs)
                _show_row(
                    described, f"Micro-batch {number}, sequence {place}", inputs, console, coloured=coloured, full=full
                )


def _show_row(row: dict[str, Any], title: str, inputs: Inputs, console: Console, *, coloured: bool, full: bool) -> None:
    noun = _NOUNS[inputs.batches.report.format]
    documents = row["documents"]
    counts = f"{_count(len(documents), noun)}, {_count(row['tokens'], 'token')}, {row['learnt']:,} learnt"
    console.print()
    console.print(Rule(Text(f"{title}: {counts}"), align="left", characters="═", style="bold"))
    for number, document in enumerate(documents):
        if number:
            console.print(Rule(Text(f"{noun} {number + 1}"), align="left", characters="─", style="dim"))
        console.print(_as_text(document["parts"], coloured, full), soft_wrap=False)
    if row["padding"]:
        console.print(Rule(Text(f"{row['padding']:,} padding"), align="left", characters="·", style="dim"))


def _as_text(parts: list[dict[str, Any]], coloured: bool, full: bool) -> Text:
    text = Text()
    for part in parts:
        shown = _printable(part["text"] if full else _shortened(part["text"]))
        if not part["learnt"]:
            text.append(shown)
        elif coloured:
            text.append(shown, style=_LEARNT_STYLE)
        else:
            text.append(f"[[{shown}]]")
    text.rstrip()
    return text


def _describe_row(row: Row, longest: int, inputs: Inputs) -> dict[str, Any]:
    learnt = row.learnt
    documents = [
        {
            "tokens": stop - start,
            "learnt": int(learnt[start:stop].sum()),
            "parts": _parts(row.ids[start:stop], learnt[start:stop], inputs.tokenizer),
        }
        for start, stop in _documents(row, inputs)
    ]
    return {
        "tokens": len(row.ids),
        "learnt": int(learnt.sum()),
        "padding": longest - len(row.ids),
        "documents": documents,
    }


def _documents(row: Row, inputs: Inputs) -> list[tuple[int, int]]:
    """Where the documents of a row begin and end; of rows that do not tell, an end-of-text token does."""
    if row.positions is not None:
        begins = np.flatnonzero(row.positions == 0)
    elif inputs.batches.report.packing == "whole" and inputs.tokenizer.eos_token_id is not None:
        begins = np.concatenate([[0], np.flatnonzero(row.ids[:-1] == inputs.tokenizer.eos_token_id) + 1])
    else:
        begins = np.zeros(1, dtype=np.int64)
    borders = [*begins.tolist(), len(row.ids)]
    return list(pairwise(borders))


def _parts(ids: np.ndarray, learnt: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Stretches of tokens that are all learnt, or all not, as text."""
    parts: list[dict[str, Any]] = []
    end, before = 0, ""
    for value, group in groupby(learnt.tolist()):
        start, end = end, end + len(list(group))
        whole = _decode(tokenizer, ids[:end])
        # Some tokenizers leave out the space at the beginning of what they decode, so the part is what is new.
        text = whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, ids[start:end])
        parts.append({"learnt": value, "tokens": end - start, "text": text})
        before = whole
    return parts


def _decode(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _shortened(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} more characters … {text[-half:]}"


def _printable(text: str) -> str:
    """``text`` with what would move a terminal's cursor or change its colours written out."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


@contextmanager
def _inputs(config: RunConfig) -> Iterator[Inputs]:
    """Model config, tokenizer and data; tokens that no other run may use are thrown away afterwards."""
    own = config.run / "cache"
    if own.is_dir():
        yield prepare_inputs(config)
        return
    with tempfile.TemporaryDirectory(prefix="greedysnake-") as folder:
        yield prepare_inputs(config, Path(folder))
