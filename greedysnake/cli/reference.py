"""``python -m greedysnake.cli.reference docs/commands.md`` brings the tables of commands in that file up to date."""

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo
from typer.utils import get_params_from_function

MARKER = "<!-- Everything below is generated: python -m greedysnake.cli.reference docs/commands.md -->\n"

_TYPES = {Path: "a path", str: "text", int: "an integer", float: "a number"}


def commands_markdown(app: typer.Typer) -> str:
    """Every command with its usage, what it does, and its arguments and options, in the order of ``--help``."""
    parts = []
    for command in app.registered_commands:
        if command.callback is not None and not command.hidden:
            parts.append(_section(command.name or command.callback.__name__.replace("_", "-"), command.callback))
    return "\n".join(parts)


def updated(text: str, app: typer.Typer) -> str:
    """``text`` of a Markdown file with what follows the marker replaced by today's commands.

    Raises:
        ValueError: the marker is not in it.
    """
    before, found, _ = text.partition(MARKER)
    if not found:
        raise ValueError(f"the line that begins the generated part is missing: {MARKER.strip()}")
    return f"{before}{MARKER}\n{commands_markdown(app)}"


def _section(name: str, function: Callable[..., Any]) -> str:
    usage, rows = [f"greedysnake {name}"], []
    for key, parameter in get_params_from_function(function).items():
        info, required = parameter.default, parameter.default.default is ...
        if isinstance(info, ArgumentInfo):
            shown = info.metavar or key.upper()
            usage.append(shown if required or shown.startswith("[") else f"[{shown}]")
        else:
            shown = "/".join(info.param_decls or [f"--{key.replace('_', '-')}"])
            if required:
                usage.append(f"{shown} {key.upper()}")
        rows.append((f"`{shown}`", _takes(parameter.annotation, info), _default(info.default), info.help or ""))
    if any(row[0].startswith("`-") for row in rows):
        usage.append("[OPTIONS]")
    lines = [f"## {name}", "", inspect.cleandoc(function.__doc__ or ""), "", "```", " ".join(usage), "```", ""]
    if rows:
        lines += ["| argument or option | takes | default | meaning |", "| --- | --- | --- | --- |"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _takes(kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    """What a value must be, such as "a number, at least 0, at most 1"."""
    several = ""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is list:
        (kind,), several = get_args(kind), ", any number of times"
    if kind is bool:
        return "nothing"
    words = " or ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else _TYPES.get(kind, "text")
    limits = (("at least", info.min), ("at most", info.max))
    return words + "".join(f", {word} {limit}" for word, limit in limits if limit is not None) + several


def _default(value: Any) -> str:
    if value is ...:
        return "required"
    return "" if value is None or value is False else f"`{value}`"


if __name__ == "__main__":
    from greedysnake.cli.app import app

    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text(encoding="utf-8"), app), encoding="utf-8")
