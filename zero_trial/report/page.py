"""HTML that is escaped by construction: only what this module made is taken for markup, every other string is text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from zero_trial.report.data import Status

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


# The page around a report: one HTML document with its style and script inside, which may load nothing from anywhere.


# The browser itself refuses whatever would be loaded, should something slip through.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def document(title: str, head: Html, sections: Sequence[tuple[str, str, Child]], created: str) -> str:
    """A whole page. ``sections``: anchor, heading (empty for none) and content; those without content are left out."""
    shown = [(anchor, heading, content) for anchor, heading, content in sections if content]
    links = [el("a", heading, href=f"#{anchor}") for anchor, heading, _ in shown if heading]
    body = [
        head,
        el("nav", links, aria_label="Sections") if len(links) > 2 else None,
        el("main", [_section(*section) for section in shown]),
        el("footer", el("p", f"Written by zero-trial{f' on {created}' if created else ''}. This page loads nothing.")),
    ]
    return (
        str(
            Html("<!DOCTYPE html>\n")
            + el("html", _head(title), el("body", body, _asset("script", "page.js")), lang="en")
        )
        + "\n"
    )


def heading(title: str, status: Status, subtitle: str) -> Html:
    """The top of a page."""
    return el("header", el("h1", title), state(status), el("p", subtitle) if subtitle else None)


def state(status: Status) -> Html:
    """A state as a word with a mark whose form, too, tells it."""
    return el("span", status.word, class_=f"state {status.tone.value}")


def figures(items: Iterable[tuple[str, str, str]], lead: int = 1) -> Html:
    """Large numbers: name, value and a remark each; the first ``lead`` stand out."""
    parts = [
        el(
            "div",
            el("dt", name),
            el("dd", value, el("small", remark) if remark else None),
            class_="lead" if at < lead else None,
        )
        for at, (name, value, remark) in enumerate(items)
    ]
    return el("dl", parts, class_="figures")


def facts(items: Iterable[tuple[str, str]], kind: str = "facts") -> Html | None:
    """Small facts in a row, or nothing."""
    parts = [el("div", el("dt", name), el("dd", value)) for name, value in items]
    return el("dl", parts, class_=kind) if parts else None


def command(text: str) -> Html:
    """A command to copy."""
    return el(
        "div", el("code", text), el("button", "Copy", type="button", class_="copy needs-script"), class_="command"
    )


def scrolling(content: Child, label: str) -> Html:
    """Something that may be wider than the screen, and then scrolls by itself, by keys too."""
    return el("div", content, class_="wide", tabindex=0, role="region", aria_label=label)


def _section(anchor: str, title: str, content: Child) -> Html:
    return el("section", el("h2", title) if title else None, content, id=anchor)


def _head(title: str) -> Html:
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("title", title),
        el("link", rel="icon", href="data:,"),
        _asset("style", "page.css"),
    )


def _asset(tag: str, name: str) -> Html:
    text = resources.files("zero_trial.report").joinpath(name).read_text(encoding="utf-8")
    return el(tag, Html(text))
