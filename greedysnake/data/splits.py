"""Which of a dataset's files are for training and which for evaluation, by their names.

The words are those that `datasets` goes by when it loads a folder of data files.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Role = Literal["train", "evaluation"]

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_WANTED: dict[Role, tuple[str, ...]] = {"train": ("train",), "evaluation": ("validation", "test")}


def split_of(relative: Path) -> str | None:
    """``train``, ``validation`` or ``test`` if a word of the path says so, the file's own name before its folders'."""
    for part in reversed(relative.parts):
        words = re.split(r"[^a-z0-9]+", part.lower())
        for split, names in _WORDS.items():
            if any(name in words for name in names):
                return split
    return None


def of_role(relatives: Sequence[Path], role: Role | None) -> list[bool]:
    """Which of a folder's record files serve ``role``: all, unless their names tell several splits apart."""
    splits = [split_of(path) for path in relatives]
    present = {split for split in splits if split is not None}
    for wanted in _WANTED[role] if role is not None else ():
        if wanted in present and len(present) > 1:
            # A file that names no split may well be training data, but is no part of a set named for evaluation.
            return [split == wanted or (split is None and role == "train") for split in splits]
    return [True] * len(splits)
