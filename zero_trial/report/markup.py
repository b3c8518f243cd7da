"""HTML that is escaped by construction: only what this module made is taken for markup, every other string is text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = frozenset({"meta", "input", "br", "link"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child = object  # Html, text, a number, None, or an iterable of these


def el(tag: str, *children: Child, **attributes: Any) -> Html:
    """An element. Underscores in attribute names are hyphens and one at the end is dropped (``class_``, ``aria_label``).

    An attribute that is None or False is left out, True stands without a value.
    """
    head = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    return Html(head if tag in VOID else f"{head}{join(children)}</{tag}>")


def join(children: Child) -> Html:
    """Children end to end, each escaped unless it is markup."""
    if children is None or children is False:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, Iterable) and not isinstance(children, (str, bytes)):
        return Html("".join(join(child) for child in children))
    return Html(escape(printable(str(children)), quote=True))


def json_data(value: Any) -> Html:
    """JSON that a script element may hold: nothing in it can end the element or start another."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json">{text}</script>')


def printable(text: str) -> str:
    """Control characters, which HTML does not allow, as their pictures; half pairs of UTF-16 as the mark for unknown characters."""
    shown = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)
    return shown.encode("utf-8", "replace").decode("utf-8")


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    spelled = name.removesuffix("_").replace("_", "-")
    return f" {spelled}" if value is True else f' {spelled}="{escape(printable(str(value)), quote=True)}"'
