"""Which model types of transformers can be trained, tried one by one; writes docs/models.md.

    python scripts/coverage.py                    # all of them, and the page: some minutes
    python scripts/coverage.py --missing          # those that the page says have not been tried: goes on after a stop
    python scripts/coverage.py llama mixtral      # what these give, and no page

Of each type a small model is trained for two steps of four micro-batches in float32, from SSD and by a plain PyTorch
loop, and every bit of every parameter is compared; then its folder is loaded and exported, and the two are compared.
Of the layers' activations a part is kept for the backward, and the others are recomputed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try types; gives 1 if one of them comes out wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; default: all, and write the page")
    parser.add_argument("--show", action="store_true", help="show warnings and tracebacks")
    parser.add_argument("--missing", action="store_true", help="only types that the page says have not been tried")
    given = parser.parse_args(arguments)

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT / "tests"))
    from models_page import NOT_TRIED, PAGE, model_types, read_page, write_page
    from one_type import UNTESTED, WRONG, Row, in_a_process

    page: dict[str, Row] = {}
    if given.missing:
        page = read_page(ROOT / PAGE)
    elif not given.types:
        page = {name: Row(model_type=name, result=UNTESTED, reason=NOT_TRIED) for name in model_types()}
    missing = [name for name, row in page.items() if row.reason == NOT_TRIED]
    rows = []
    for model_type in given.types or missing:
        row = in_a_process(model_type, show=given.show)
        rows.append(row)
        print(f"{row.model_type:30} {row.result:10} {row.reason}", flush=True)
        if not given.types:  # after every type, so that what was found is not lost with the process
            page[model_type] = row
            write_page(list(page.values()), ROOT / PAGE)
    return int(any(row.result == WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main())
