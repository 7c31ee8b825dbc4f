"""docs/models.md: written from what was found, and read back."""

from collections.abc import Sequence
from pathlib import Path

import transformers
from one_type import BITWISE, CLOSE, REFUSED, UNTESTED, WRONG, Row
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path("docs") / "models.md"

NOT_TRIED = "not tried yet"

_MEANINGS = {
    BITWISE: "works, bitwise",
    CLOSE: "works, within tolerance",
    REFUSED: "refused",
    UNTESTED: "not tested",
    WRONG: "wrong",
}

_HEAD = """# Which models can be trained

Written by `scripts/coverage.py`, with transformers {version}, which has {count} types of causal language model.

| result | types |
| --- | --- |
| works, bitwise | {bitwise} |
| works, within tolerance | {tolerance} |
| refused | {refused} |
| not tested | {untested} |

*Works, bitwise*: two steps of training from SSD in float32 give every bit of every parameter that a plain PyTorch
loop gives, and a model folder that transformers wrote is the same after it was loaded and exported. *Within
tolerance*: likewise, but tensors differ in their last bits. *Refused*: `greedysnake` says why, and changes nothing.
Three fifths of the activations are kept for the backward, where they are no larger than planned; the others are
recomputed.
*Not tested*: plain PyTorch cannot make a small model of the type, or not train it on text alone, or nobody has tried.

Each is a small model with random weights: four layers, four micro-batches of uneven lengths with padding, delayed
updates, clipping. Any model type that is not in this list is treated by the same rules: it works if its layers are
a list that its forward goes through once, in order, and is refused with the reason if not.

Model folders in the layout of the hub are read as `from_pretrained` reads them, with its renaming of keys and
merging of experts. Refused by name are weights in pickles (`.bin`), quantised weights, and models made of Python
code of their own, unless `model.trust_remote_code: true` says that it may be run.

| model type | result | reason |
| --- | --- | --- |
"""


def model_types() -> list[str]:
    """Every type that ``AutoModelForCausalLM`` knows."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def write_page(rows: Sequence[Row], path: Path) -> None:
    """Write the page."""
    counts = {result: sum(row.result == result for row in rows) for result in _MEANINGS}
    text = _HEAD.format(version=transformers.__version__, count=len(rows), **counts)
    for row in sorted(rows, key=lambda row: row.model_type):
        reason = row.reason.replace("|", "\\|").replace("\n", " ")
        text += f"| {row.model_type} | {_MEANINGS[row.result]} | {reason} |\n"
    path.write_text(text)


def read_page(path: Path) -> dict[str, Row]:
    """The rows of the page, by model type."""
    results = {meaning: result for result, meaning in _MEANINGS.items()}
    rows = {}
    _, _, table = path.read_text().partition("| model type | result | reason |\n")
    for line in table.splitlines()[1:]:
        model_type, result, reason = (part.strip() for part in line.strip("|").split(" | ", 2))
        rows[model_type] = Row(model_type=model_type, result=results[result], reason=reason.rstrip(" |"))
    return rows
