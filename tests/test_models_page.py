"""docs/models.md is of the transformers that is installed, and still true."""

import re
from pathlib import Path

import pytest
import transformers
from models_page import PAGE, model_types, read_page
from one_type import REFUSED, WRONG, try_type

ROOT = Path(__file__).parents[1]
ROWS = read_page(ROOT / PAGE)


def test_the_page_is_of_the_pinned_transformers_and_lists_exactly_its_types():
    pinned = re.search(r"^transformers==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    if transformers.__version__ != pinned[1]:
        pytest.skip(f"transformers {transformers.__version__} is not the pinned {pinned[1]}")
    assert f"with transformers {pinned[1]}," in (ROOT / PAGE).read_text()
    assert list(ROWS) == model_types()
    assert [row.model_type for row in ROWS.values() if row.result == WRONG] == []
    assert [row.model_type for row in ROWS.values() if row.result == REFUSED and not row.reason] == []


@pytest.mark.parametrize("model_type", ["codegen", "falcon", "granitemoe", "bart", "emu3", "dory"])
def test_rows_come_out_again_as_they_were(tmp_path, model_type):
    assert try_type(model_type, tmp_path) == ROWS[model_type]
