"""The frame that every part of a report page has."""


def card(title: str, body: str, *, wide: bool = False) -> str:
    """A part of the page with its title; ``wide`` ones take the whole width. Both are HTML already."""
    return f'<section class="card{" wide" if wide else ""}"><h2>{title}</h2>{body}</section>'
