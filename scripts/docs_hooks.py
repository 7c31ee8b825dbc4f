"""What mkdocs.yml has done to each page of the documentation."""

import re

_ROLE = re.compile(r":(?:class|func|meth|mod):(?=<(?:code|a|autoref))")


def on_page_content(html: str, **_: object) -> str:
    """Leave out the roles, such as ``:meth:``, that docstrings have before names for Sphinx."""
    return _ROLE.sub("", html)
