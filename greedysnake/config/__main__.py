"""``python -m greedysnake.config docs/config.md`` brings the reference in that file up to date."""

import sys
from pathlib import Path

from greedysnake.config.reference import updated

if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
