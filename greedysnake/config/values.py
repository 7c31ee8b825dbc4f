"""The kinds of value that settings take, stricter than pydantic's own where a typing slip would pass.

No text counts as an integer and no integer as a truth value. A validator's message says what is needed, as
does ``needs`` in the JSON schema where the schema alone would not tell.
"""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from greedysnake.units import parse_bytes, parse_count

NEEDS_PATH = "needs a path (in quotes if it looks like a number or a date)"
NEEDS_PATHS = "needs a path, or a list of one or more paths"
NEEDS_FOLDERS = "needs a list of one or more folders, such as [/nvme0/run, /nvme1/run]"
NEEDS_PATTERNS = "needs a list of one or more patterns, such as [model.embed_tokens.*]"
NEEDS_TARGETS = "needs a list of one or more names of modules, such as [q_proj, v_proj], or all-linear"
NEEDS_SIZE = "needs a size above 0, such as 16GiB or a number of bytes"
NEEDS_TEXTS = "needs a list of texts, none of them empty"
NEEDS_COUNT = "needs a number of tokens above 0, such as 20M, 1B or 3e9"
NEEDS_WANDB = "needs a mapping with project (text), and if wanted name (text) and mode (online or offline)"
NEEDS_BETAS = "needs two numbers, each at least 0 and below 1"
NEEDS_PLAIN = "needs a mapping of plain data (text, numbers, true, false, null, lists, mappings)"

LARGEST_INT = 2**63 - 1  # what fits the machine integers that settings end up in
_DECIMAL = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_MAX_DEPTH, _MAX_ENTRIES = 20, 20_000


def to_path(value: object) -> Path:
    """``value`` as a path; a leading ``~`` becomes the home folder.

    Raises:
        ValueError: ``value`` is neither text nor a path, is empty, or cannot name a file.
    """
    if not isinstance(value, str | Path) or value == "":
        raise ValueError(NEEDS_PATH)
    try:
        path = Path(value).expanduser()
        unusable = b"\0" in os.fsencode(path)
    except (RuntimeError, UnicodeError):  # no such home folder; characters that no file name can have
        unusable = True
    if unusable:
        raise ValueError("needs a path that a file can have")
    return path


def to_paths(value: object) -> Path | list[Path]:
    """``value`` as a path or a list of one or more of them.

    Raises:
        ValueError: ``value`` is neither.
    """
    if isinstance(value, list | tuple) and value:
        return [to_path(one) for one in value]
    try:
        return to_path(value)
    except ValueError as error:
        raise ValueError(NEEDS_PATHS) from error


def to_storage(value: object) -> list[Path]:
    """``value`` as the list of storage folders.

    Raises:
        ValueError: ``value`` is not a list of distinct paths.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(NEEDS_FOLDERS)
    folders = [to_path(one) for one in value]
    if len(set(folders)) != len(folders):
        raise ValueError(f"{NEEDS_FOLDERS}; each once")
    return folders


def to_size(value: object) -> int:
    """Bytes of a size such as ``"16GiB"`` or ``4096``.

    Raises:
        ValueError: ``value`` is not a size above 0.
    """
    try:
        size = parse_bytes(value)  # type: ignore[arg-type]  # it refuses what is neither int nor str
    except (ValueError, OverflowError) as error:
        raise ValueError(NEEDS_SIZE) from error
    if not 0 < size <= LARGEST_INT:
        raise ValueError(NEEDS_SIZE)
    return size


def to_count(value: object) -> int:
    """A number of tokens such as ``"20M"`` or ``3e9``.

    Raises:
        ValueError: ``value`` is not a number above 0.
    """
    try:
        count = parse_count(value)
    except ValueError as error:
        raise ValueError(NEEDS_COUNT) from error
    if count > LARGEST_INT:
        raise ValueError(NEEDS_COUNT)
    return count


class WandbConfig(BaseModel):
    """Which run at Weights & Biases the metrics go to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: Annotated[str, Field(strict=True, min_length=1)]
    name: Annotated[str, Field(strict=True, min_length=1)] | None = None
    mode: Literal["online", "offline"] = "online"


def to_wandb(value: object) -> WandbConfig:
    """``value`` as settings for Weights & Biases.

    Raises:
        ValueError: ``value`` is not a mapping with these keys.
    """
    try:
        return WandbConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(NEEDS_WANDB) from error


def number_from_text(value: object) -> object:
    """A float for text such as ``"2e-5"``, which YAML 1.1 does not read as a number; else ``value``."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_INT:
        raise ValueError("needs a smaller number")
    return value


def to_plain_mapping(value: object) -> dict[str, object]:
    """A copy of ``value``, a mapping made of nothing but plain data.

    Raises:
        ValueError: it holds anything else (a date, a set, a nan), itself, or more than a config can need.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(NEEDS_PLAIN)
    entries = 0

    def copied(part: object, depth: int) -> object:
        nonlocal entries
        entries += 1
        # A YAML alias can stand for itself, or for a billion entries in a few lines.
        if depth > _MAX_DEPTH or entries > _MAX_ENTRIES:
            raise ValueError(f"needs at most {_MAX_DEPTH} levels and {_MAX_ENTRIES} entries")
        if isinstance(part, dict):
            if not all(isinstance(key, str | int) for key in part):
                raise ValueError(NEEDS_PLAIN)
            return {key: copied(inner, depth + 1) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [copied(inner, depth + 1) for inner in part]
        if part is None or isinstance(part, str | bool):
            return part
        if isinstance(part, int) and abs(part) <= LARGEST_INT:
            return part
        if isinstance(part, float) and not math.isnan(part):  # a nan is not even equal to itself
            return part
        raise ValueError(NEEDS_PLAIN)

    return {key: copied(inner, 1) for key, inner in value.items()}


def _needs(text: str) -> WithJsonSchema:
    return WithJsonSchema({"needs": text.removeprefix("needs ")})


FilePath = Annotated[Path, BeforeValidator(to_path), _needs(NEEDS_PATH)]
FilePaths = Annotated[Path | list[Path], BeforeValidator(to_paths), _needs(NEEDS_PATHS)]
StorageFolders = Annotated[list[Path], BeforeValidator(to_storage), _needs(NEEDS_FOLDERS)]
PlainMapping = Annotated[dict[str, object], BeforeValidator(to_plain_mapping), _needs(NEEDS_PLAIN)]
TokenCount = Annotated[int, BeforeValidator(to_count), _needs(NEEDS_COUNT)]
WandbMapping = Annotated[WandbConfig, BeforeValidator(to_wandb), _needs(NEEDS_WANDB)]
Size = Annotated[int, BeforeValidator(to_size), _needs(NEEDS_SIZE)]

Text = Annotated[str, Field(strict=True, min_length=1)]
Texts = Annotated[list[Text], _needs(NEEDS_TEXTS)]
Flag = Annotated[bool, Field(strict=True)]
Integer = Annotated[int, Field(strict=True, ge=0, le=LARGEST_INT)]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST_INT)]

_FromText = BeforeValidator(number_from_text)
Names = Annotated[list[Text], Field(min_length=1)]
Patterns = Annotated[Names, _needs(NEEDS_PATTERNS)]
Targets = Annotated[Literal["all-linear"] | Names, _needs(NEEDS_TARGETS)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), _FromText]
Epochs = Annotated[float, Field(strict=True, gt=0, le=1e6), _FromText]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), _FromText]
Share = Annotated[float, Field(strict=True, ge=0, le=1), _FromText]
HalfShare = Annotated[float, Field(strict=True, ge=0, le=0.5), _FromText]
UnderOne = Annotated[float, Field(strict=True, ge=0, lt=1), _FromText]
Betas = Annotated[tuple[UnderOne, UnderOne], _needs(NEEDS_BETAS)]
