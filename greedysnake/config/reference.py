"""The tables of all settings, made from the schema."""

import json
from collections.abc import Mapping
from typing import Any

from greedysnake.config.schema import sections
from greedysnake.config.section import Section
from greedysnake.config.values import LARGEST_INT

MARKER = "<!-- Everything below is generated: python -m greedysnake.config docs/config.md -->\n"


def needed(model: type[Section], key: str) -> str:
    """What the setting ``key`` of section ``model`` takes, such as "a number, above 0, or null"."""
    return _needed(model.model_json_schema()["properties"][key])


def reference_markdown() -> str:
    """All settings as one Markdown table a section, in the order of the schema."""
    parts = []
    for section, model in sections().items():
        parts.append(f"## {section or 'Top level'}\n\n{_summary(model)}\n\n" + _table(model))
    return "\n".join(parts)


def updated(text: str) -> str:
    """``text`` of a Markdown file with what follows the marker replaced by today's reference.

    Raises:
        ValueError: the marker is not in it.
    """
    before, found, _ = text.partition(MARKER)
    if not found:
        raise ValueError(f"the line that begins the generated part is missing: {MARKER.strip()}")
    return f"{before}{MARKER}\n{reference_markdown()}"


def _summary(model: type[Section]) -> str:
    return (model.__doc__ or "").partition("\n")[0]


def _table(model: type[Section]) -> str:
    schema = model.model_json_schema()
    rows = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in schema["properties"].items():
        if key in sections():  # a section of its own, further down
            continue
        default = "required" if key in schema.get("required", ()) else f"`{_shown(field.get('default'))}`"
        if key == "tokenizer":  # depends on another setting; the meaning tells
            default = "see there"
        cells = (f"`{key}`", _needed(field), default, field["description"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _shown(default: object) -> str:
    return default if isinstance(default, str) else json.dumps(default)


def _needed(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return ", or ".join(_needed(option) for option in field["anyOf"])
    if "needs" in field:
        return str(field["needs"])
    if "enum" in field:
        return " or ".join(field["enum"])
    words = {
        "boolean": "true or false",
        "integer": "an integer",
        "number": "a number",
        "string": "text",
        "null": "null",
        "object": "a section with its own keys",
    }
    text = words[field.get("type", "object")]
    if text == "a number" and not {"maximum", "exclusiveMaximum"} & field.keys():
        text = "a finite number"
    limits = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
        "multipleOf": "a multiple of {}",
    }
    for name, phrase in limits.items():
        # The largest integer is a limit of the machine, not of the setting.
        if name in field and field[name] != LARGEST_INT:
            text += ", " + phrase.format(f"{field[name]:g}")
    return text
