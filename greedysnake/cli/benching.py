"""What ``greedysnake bench`` does: what is asked for as a matrix, measured, and shown as a table and pictures."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greedysnake.bench.cells import Cell, Method, Setting
from greedysnake.bench.check import LOSS_TOLERANCE, NORM_TOLERANCE, unchecked
from greedysnake.bench.estimate import Estimator
from greedysnake.bench.matrix import cells_of, describe_setting, measure_matrix, settings_of
from greedysnake.bench.measure import Place, impossible
from greedysnake.bench.models import bench_config
from greedysnake.bench.picture import draw_smallest, draw_table
from greedysnake.bench.results import Results, open_results, save_results
from greedysnake.bench.smallest import LEAST_BYTES, Smallest, find_smallest, in_words, most_trials
from greedysnake.bench.systems import DEFAULT_SYSTEMS, System, ablations, find_systems
from greedysnake.bench.table import HEADINGS, Line, cells_in_words, markdown, table_lines
from greedysnake.errors import ConfigError
from greedysnake.plan.hardware import load_hardware
from greedysnake.plan.host import usable_bytes
from greedysnake.report import wording
from greedysnake.units import parse_bytes

DEFAULT_MACHINE = "laptop-cpu-24gb"
_NONE = "none"
_GIB = 2**30
_TABLE_WIDTH = 150
"""Characters, where the terminal has fewer or there is none."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be measured, in the words of the command line.

    Attributes:
        models, micro_batches, memory, disk, systems: the matrix.
        runs: of each cell.
        method: what all cells share.
        place: where they are measured.
        out: file of results; pictures are written beside it.
        machine: profile for the first estimate of the time.
        ablate: system of which one thing is switched off at a time, instead of ``systems``; None: no ablation.
        smallest: whether the smallest memory is looked for, instead of speed.
    """

    models: Sequence[str]
    micro_batches: Sequence[int]
    memory: Sequence[str]
    disk: Sequence[str]
    systems: Sequence[str]
    runs: int
    method: Method
    place: Place
    out: Path
    machine: str = DEFAULT_MACHINE
    ablate: str | None = None
    smallest: bool = False


class ConsoleScreen:
    """Progress on a console: lines that stay, and one that tells what is going on now."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(escape(text))

    @contextmanager
    def working(self, text: str) -> Iterator[Callable[[str], None]]:
        """A line with a spinner, gone when it is done."""
        with self._console.status(escape(text)) as status:
            yield lambda more: status.update(escape(f"{text}: {more}"))


def run_bench(question: Question, console: Console) -> dict[str, Any]:
    """Measure what is missing, and show all of it.

    Returns:
        The lines of the table, or the smallest memory of each system, and the files written.

    Raises:
        GreedySnakeError: what is wrong and what to change; what was measured before stays in the file.
    """
    settings, systems = _checked(question)
    with question.place.held():
        try:
            question.place.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out {question.out}: cannot write there: {error.strerror}. Name a file in a folder that can be "
                f"written"
            ) from error
        return _measure(question, settings, systems, console)


def _measure(question: Question, settings: list[Setting], systems: list[System], console: Console) -> dict[str, Any]:
    results = open_results(question.out, question.method)
    if question.smallest:
        return _smallest(question, (settings, systems), results, console)
    estimator = Estimator(load_hardware(question.machine), question.method)
    cells = cells_of(settings, systems, question.runs)
    results = measure_matrix(
        results,
        cells,
        systems,
        place=question.place,
        estimator=estimator,
        path=question.out,
        screen=ConsoleScreen(console),
    )
    lines = table_lines(results, [system.name for system in systems], settings)
    _print_table(lines, results, console)
    pictures = _draw(question, lines)
    table = question.out.with_suffix(".md")
    table.write_text(markdown(lines) + "\n", encoding="utf-8")
    console.print(escape(f"Wrote {', '.join(map(str, [question.out, table, *pictures]))}."))
    headings = [*HEADINGS[:-1], "problem"]
    rows = [dict(zip(headings, row, strict=True)) for row in cells_in_words(lines)]
    for row, line in zip(rows, lines, strict=True):
        row["setting"] = describe_setting(line.setting)
    return {"table": rows, "wrong": any(line.wrong for line in lines), "pictures": [str(path) for path in pictures]}


def _checked(question: Question) -> tuple[list[Setting], list[System]]:
    """The settings and systems asked for, with every problem at once."""
    problems, systems = [], []
    sizes: dict[str, list[int | None]] = {"memory": [], "disk": []}
    for name, found in sizes.items():
        for text in getattr(question, name) or [_NONE]:
            try:
                found.append(None if text == _NONE else _size(text))
            except ValueError as error:
                problems.append(f"--{name}: {error}; or {_NONE}")
    try:
        if question.ablate is not None:
            systems = ablations(question.ablate, clipping=question.method.max_grad_norm is not None)
        else:
            systems = find_systems(list(question.systems or DEFAULT_SYSTEMS))
    except ConfigError as error:
        problems.append(str(error))
    for model in question.models:
        try:
            bench_config(model, question.method.tokens)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return settings_of(question.models, question.micro_batches, sizes["memory"], sizes["disk"]), systems


def _size(text: str) -> int:
    """Bytes of a limit.

    Raises:
        ValueError: it is none, or leaves nothing.
    """
    size = parse_bytes(text)
    if size < 1:
        raise ValueError(f"{text!r} leaves nothing to run with; write it like '16GiB' or '400M'")
    return size


def _smallest(
    question: Question, asked: tuple[list[Setting], list[System]], results: Results, console: Console
) -> dict[str, Any]:
    settings, systems = asked
    screen, estimator = ConsoleScreen(console), Estimator(load_hardware(question.machine), question.method)
    seconds = sum(
        most_trials(LEAST_BYTES, _most_memory(setting))
        * estimator.seconds(Cell(setting=setting, system=system.name), system)
        for setting in settings
        for system in systems
        if not impossible(system, question.place)
    )
    screen.say(f"At most about {wording.seconds(seconds)}: a trial for each half of what is left, for each system.")
    answers: list[Smallest] = []
    for setting in settings:
        for system in systems:
            results, answer = find_smallest(
                results,
                setting,
                system,
                most=_most_memory(setting),
                place=question.place,
                path=question.out,
                screen=screen,
            )
            answers.append(answer)
            console.print(escape(in_words(answer)))
    save_results(question.out, results)
    pictures = []
    for setting in settings:
        own = [a for a in answers if (a.model, a.micro_batches, a.disk) == _what(setting)]
        path = _picture(question, f"{setting.model}-m{setting.micro_batches}-memory", several=len(settings) > 1)
        title = f"Smallest memory: {describe_setting(setting.model_copy(update={'memory': None}))}"
        draw_smallest(path, own, title)
        pictures.append(str(path))
    console.print(escape(f"Wrote {', '.join([str(question.out), *pictures])}."))
    return {"smallest_memory": [answer.model_dump() for answer in answers], "pictures": pictures}


def _what(setting: Setting) -> tuple[str, int, int | None]:
    return setting.model, setting.micro_batches, setting.disk


def _print_table(lines: Sequence[Line], results: Results, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=bool(heading), overflow="fold")
    for row in cells_in_words(lines):
        table.add_row(*map(escape, row))
    console.print(table, width=max(console.width, _TABLE_WIDTH), crop=False)
    wrong = [line for line in lines if line.wrong]
    alone = unchecked(results.measured)
    if wrong:
        console.print(f"[bold red]{len(wrong)} lines have losses that differ from the others': do not trust them.[/]")
    elif not alone and any(one.outcome.steps for one in results.measured):
        console.print(
            f"Losses of all systems agree within {LOSS_TOLERANCE:.1%} at each step, norms of gradients within "
            f"{NORM_TOLERANCE:.0%}."
        )
    for model, micro_batches in sorted(alone):
        console.print(escape(f"{model}, M = {micro_batches}: one system only, so its losses were compared with none."))


def _draw(question: Question, lines: Sequence[Line]) -> list[Path]:
    """A picture for each model, since speeds of different models have no common scale."""
    models = list(dict.fromkeys(line.setting.model for line in lines))
    pictures = []
    for model in models:
        path = _picture(question, model, several=len(models) > 1)
        method = question.method
        title = f"{Path(model).stem if os.sep in model else model}: B = {method.rows}, T = {method.tokens}, bfloat16"
        try:
            draw_table(path, [line for line in lines if line.setting.model == model], title)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        pictures.append(path)
    return pictures


def _most_memory(setting: Setting) -> int:
    """Bytes to begin with: whole GiB of what is free, so that a call that goes on tries the same sizes."""
    return setting.memory or max(_GIB, usable_bytes() // _GIB * _GIB)


def _picture(question: Question, name: str, *, several: bool) -> Path:
    """Beside the file of results, with the same name."""
    if not several:
        return question.out.with_suffix(".png")
    plain = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name)
    return question.out.with_name(f"{question.out.stem}-{plain}.png")
