"""HTML that is escaped by construction: only output of this module is treated as markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from zero_trial.report.report_data import Memory, Status
from zero_trial.util.text import format_bytes, shorten

VOID = frozenset({"meta", "input", "wbr", "link"})


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


Child = object  # Html, text, a number, None, or an iterable of these

# Darkest first: persistent parts, then those that live within a step.
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def el(tag: str, *children: Child, **attributes: Any) -> Html:
    """Return an element.

    Converts underscores in attribute names to hyphens and drops a trailing one (``class_``,
    ``aria_label``).

    Omits attributes that are None or False; writes True without a value.
    """
    head = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    return Html(head if tag in VOID else f"{head}{join(children)}</{tag}>")


def join(children: Child) -> Html:
    """Return the concatenated children; escape all that are not markup."""
    if children is None or children is False:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, Iterable) and not isinstance(children, (str, bytes)):
        return Html("".join(join(child) for child in children))
    return Html(escape(_printable(str(children)), quote=True))


def json_data(value: Any) -> Html:
    """Return JSON in a script element, escaped so that the content cannot close the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json">{text}</script>')


def _printable(text: str) -> str:
    """Replace control characters with visible symbols, and unpaired surrogates with "?"."""
    shown = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)
    return shown.encode("utf-8", "replace").decode("utf-8")


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    spelled = name.removesuffix("_").replace("_", "-")
    return f" {spelled}" if value is True else f' {spelled}="{escape(_printable(str(value)), quote=True)}"'


# The page around a report: one self-contained HTML document that loads nothing.


# The browser blocks all loads, even if the page contained any.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class PageSection:
    """A part of a page: its anchor, its heading (may be empty) and its content."""

    anchor: str
    title: str
    content: Child

    def markup(self) -> Html:
        """Return the element."""
        return el("section", el("h2", self.title) if self.title else None, self.content, id=self.anchor)


def breakable(name: str) -> Html:
    """Return a name that can wrap at its dots and underscores, not within a word."""
    return join([[part, el("wbr")] for part in re.findall(r"[^._]*[._]|[^._]+", name)])


def document(title: str, head: Html, sections: Sequence[PageSection], created: str) -> str:
    """Return a whole page; omit empty sections."""
    shown = [section for section in sections if section.content]
    links = [el("a", section.title, href=f"#{section.anchor}") for section in shown if section.title]
    body = [
        head,
        el("nav", links, aria_label="Sections") if len(links) > 2 else None,
        el("main", [section.markup() for section in shown]),
        el(
            "footer",
            el(
                "p",
                f"Written by zero-trial{f' on {created}' if created else ''}. This page loads no external resources.",
            ),
        ),
    ]
    script = el("script", Html(asset("page.js")))
    return f"<!DOCTYPE html>\n{el('html', page_head(title), el('body', body, script), lang='en')}\n"


def heading(title: str, status: Status, subtitle: str) -> Html:
    """Return the top of a page."""
    return el("header", el("h1", title), state(status), el("p", subtitle) if subtitle else None)


def state(status: Status) -> Html:
    """Return a state as a word and a mark; marks differ in shape, not only in color."""
    return el("span", status.word, class_=f"state {status.tone.value}")


def figures(items: Iterable[tuple[str, str, str]]) -> Html:
    """Return large numbers, each with name, value and remark; the first is larger."""
    parts = [
        el(
            "div",
            el("dt", breakable(shorten(name))),
            el("dd", value, el("small", remark) if remark else None),
            class_="lead" if at == 0 else None,
        )
        for at, (name, value, remark) in enumerate(items)
    ]
    return el("dl", parts, class_="figures")


def facts(items: Iterable[tuple[str, str]], kind: str = "facts") -> Html | None:
    """Return small facts in a row; None if there are none."""
    parts = [el("div", el("dt", breakable(name)), el("dd", value)) for name, value in items]
    return el("dl", parts, class_=kind) if parts else None


def command(text: str) -> Html:
    """Return a command with a copy button."""
    return el(
        "div", el("code", text), el("button", "Copy", type="button", class_="copy needs-script"), class_="command"
    )


def table(columns: Iterable[tuple[Child, str | None]], rows: Child, **attributes: Any) -> Html:
    """Return a table of rows. ``columns``: name and class of each column."""
    head = el("tr", [el("th", name, scope="col", class_=kind) for name, kind in columns])
    return el("table", el("thead", head), el("tbody", rows), **attributes)


def scrolling(content: Child, label: str) -> Html:
    """Return content that scrolls separately if it is wider than the screen, also with keys."""
    return el("div", content, class_="wide", tabindex=0, role="region", aria_label=label)


def page_head(title: str, policy: str = _POLICY, more_styles: str = "") -> Html:
    """Return the head of a page that loads nothing. ``policy``: what the browser may run and load;
    ``more_styles``: styles added to those of every page."""
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("title", title),
        el("link", rel="icon", href="data:,"),
        el("style", Html(asset("page.css") + more_styles)),
    )


def asset(name: str) -> str:
    """Return a style sheet or script that is shipped with the reports."""
    return resources.files("zero_trial.report").joinpath(name).read_text(encoding="utf-8")


def memory_view(memory: Memory) -> Html | None:
    """Return bars of the planned parts and of the planned and measured peaks on one scale, with
    remarks; None if nothing is known."""
    if memory.planned is None and memory.measured is None and not memory.processes:
        return None
    widest = max(memory.planned or 0, memory.measured or 0, sum(_parts(memory).values()), 1)
    rows = []
    if memory.planned is not None:
        rows.append(
            _row("planned", _stack(_parts(memory) or {"peak": memory.planned}, memory.planned, widest), memory.planned)
        )
    if memory.measured is not None:
        rows.append(_row("measured", _stack({"measured": memory.measured}, memory.measured, widest), memory.measured))
    return join([rows, _key(_parts(memory)), _remarks(memory)])


def bar(value: float | None, widest: float, text: str) -> Child:
    """Return a number with a bar under it; just the text if ``value`` is None."""
    if value is None or widest <= 0:
        return text
    return [text, el("span", el("i", style=f"--w:{min(value / widest, 1):.4g}"), class_="bar", aria_hidden="true")]


def _parts(memory: Memory) -> Mapping[str, int]:
    return {name: memory.parts[name] for name in PARTS if memory.parts.get(name)}


def _stack(parts: Mapping[str, int], peak: int, widest: int) -> Html:
    """Return the parts as one bar. Not all parts exist at the same time: if their sum exceeds the
    peak, they are scaled down to it."""
    total = max(sum(parts.values()), peak)
    cells = [
        el(
            "i",
            title=f"{name}: {format_bytes(value)}",
            style=f"--w:{value / total * peak / widest:.4g};--m:{_shade(name)}",
        )
        for name, value in parts.items()
    ]
    return el("div", cells, class_="stack", aria_hidden="true")


def _shade(name: str) -> str:
    return f"{1.0 - 0.19 * PARTS.index(name):.2f}" if name in PARTS else "1"


def _row(name: str, stack: Html, value: int) -> Html:
    return el("div", el("span", name), stack, el("b", format_bytes(value)), class_="stack-row")


def _key(parts: Mapping[str, int]) -> Html | None:
    if not parts:
        return None
    items = [
        el("li", el("i", class_="swatch", style=f"--m:{_shade(name)}"), name, el("b", format_bytes(value)))
        for name, value in parts.items()
    ]
    return el("ul", items, class_="legend")


def _remarks(memory: Memory) -> Html:
    said = ["Bytes of live tensors on rank 0 at the peak of a step."] if memory.planned or memory.measured else []
    if memory.planned and memory.measured:
        percent = 100 * (memory.planned / memory.measured - 1)
        right = "was accurate to a tenth of a percent" if abs(percent) < 0.05 else f"is off by {percent:+.1f} %"
        said.append(f"The plan, made before the first step, {right}.")
    if memory.parts and memory.planned and sum(_parts(memory).values()) > memory.planned * 1.001:
        said.append(
            "The parts do not all peak at the same time, so their sum exceeds the peak; they are drawn in proportion."
        )
    if memory.processes:
        kind = f" ({memory.processes_kind})" if memory.processes_kind else ""
        each = ", ".join(format_bytes(value) for value in memory.processes)
        said.append(f"Peak of each rank's process{kind}, libraries included: {each}.")
    return el("p", " ".join(said), class_="note", style="margin-top:.9rem")
