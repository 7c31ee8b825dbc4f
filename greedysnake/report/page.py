"""``report.html``: how a run went and where its time goes, as one page that loads nothing from anywhere."""

import os
from pathlib import Path

from greedysnake import __version__
from greedysnake.errors import ConfigError
from greedysnake.report import sections
from greedysnake.report.page_style import SCRIPT, style
from greedysnake.report.run_files import RunFiles, read_run
from greedysnake.report.wording import safe

PAGE_NAME = "report.html"


def write_report(run: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the page of a run.

    Args:
        run: a run folder; its files may be cut short or missing.
        out: the file to write or replace; ``report.html`` in the run folder if None.

    Returns:
        The page's path, and a sentence for everything that the run folder lacks.

    Raises:
        ConfigError: ``run`` is no run folder, or ``out`` cannot be written.
    """
    files = read_run(run)
    out = out or run / PAGE_NAME
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(report_page(files), encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"--out: cannot write {out}: {error.strerror}") from error
    return out, files.missing


def report_page(files: RunFiles) -> str:
    """The whole page as text."""
    name = safe(files.folder.resolve().name)
    body = "\n".join(
        [
            f"<h1>{name}</h1>",
            sections.status(files),
            sections.missing(files),
            sections.headline(files),
            '<div class="cards">',
            *sections.cards(files),
            "</div>",
        ]
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" />
<title>{name} · GreedySnake</title>
<style>
{style()}</style>
</head>
<body>
<main>
{body}
<footer>Written by GreedySnake {safe(__version__)} from the files of the run folder. Medians leave out the first step,
which also warms up. Memory is in powers of 1024 (GiB), what disks move is in powers of 1000 (GB).</footer>
</main>
<div id="tip"></div>
<script>{SCRIPT}</script>
</body>
</html>
"""
