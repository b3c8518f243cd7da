"""A hook of mkdocs: show roles of docstrings as code, and let keys in tables be broken after their
dots and underscores."""

from __future__ import annotations

import re


def on_page_content(html: str, **_: object) -> str:
    """Return a page without the roles of docstrings (``:meth:``), and with a place for a line break
    after each dot and underscore of a key."""
    html = re.sub(r":(?:attr|class|func|meth|mod):(?=<code)", "", html)
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: re.sub(r">[^<]*", _breakable, cell[0]), html, flags=re.DOTALL)


def _breakable(text: re.Match[str]) -> str:
    return re.sub(r"(?<=[._])(?=[A-Za-z])", "<wbr>", text[0])
