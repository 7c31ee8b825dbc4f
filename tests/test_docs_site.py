"""The documentation builds without a warning, leaves no page out, and its generated parts are up to date."""

import json
import os
import re
import subprocess
import sys

import pytest
from pages import DOCS, ROOT
from typer.testing import CliRunner

from greedysnake.cli.app import app
from greedysnake.cli.reference import MARKER, commands_markdown, updated


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as `make docs` builds it; any warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_navigation(site):
    index = (site / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html")
        assert (site / name).is_file(), name
        assert f'href="{name}"' in index, f"{name}: add a line to nav in mkdocs.yml"


def test_pages_load_nothing_from_other_hosts(site):
    loaded = r'<(?:script|img|iframe)[^>]*\bsrc="?(https?:|//)|<link[^>]*rel="?stylesheet[^>]*href="?(https?:|//)'
    for page in site.rglob("*.html"):
        assert not re.search(loaded, page.read_text()), page


def test_the_python_reference_has_every_public_name_and_error(site):
    import greedysnake
    from greedysnake import errors

    page = (site / "api.html").read_text()
    names = [f"greedysnake.{name}" for name in greedysnake.__all__]
    names += [f"greedysnake.errors.{name}" for name in vars(errors) if name.endswith("Error")]
    assert len(names) > 10
    for name in names:
        assert f'id="{name}"' in page, f"{name}: add it to docs/api.md"
    assert 'id="greedysnake.Trainer.step"' in page
    assert not re.search(r":(class|func|meth|mod):", page)  # are Sphinx's
    assert "One optimizer update from a list of micro-batches" in page


def test_search_finds_a_setting(site):
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any("resident_weights" in part["text"] for part in found)


def test_the_reference_of_commands_is_up_to_date():
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert text == updated(text, app), "run: python -m greedysnake.cli.reference docs/commands.md"
    help_ = CliRunner().invoke(app, ["--help"]).output
    for name in re.findall(r"^## (\S+)$", commands_markdown(app), re.MULTILINE):
        assert re.search(rf"\b{name}\b", help_)


def test_a_file_without_the_marker_is_refused():
    with pytest.raises(ValueError, match="the line that begins the generated part is missing"):
        updated("# Commands\n", app)
    assert updated(f"# Commands\n{MARKER}old", app) == f"# Commands\n{MARKER}\n{commands_markdown(app)}"


def test_every_example_is_shown():
    page = (DOCS / "examples.md").read_text()
    for example in (ROOT / "examples").iterdir():
        assert f'--8<-- "examples/{example.name}"' in page, example.name
