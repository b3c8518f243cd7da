"""HTML as a list of its elements; elements that are left open, or closed and never opened, are
faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "wbr", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    inside: tuple[str, ...] = ()


@dataclass
class Page:
    elements: list[Element] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def of(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def having(self, name: str) -> list[Element]:
        return [element for element in self.elements if name in (element.attributes.get("class") or "").split()]

    @property
    def text(self) -> str:
        hidden = ("script", "style")
        return " ".join(element.text for element in self.elements if element.tag not in hidden)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = Page()
        self.open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(set(names)) < len(names):
            self.page.faults.append(f"<{tag}> has an attribute twice: {names}")
        element = Element(tag, dict(attrs), inside=tuple(outer.tag for outer in self.open))
        self.page.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1].tag != tag:
            self.page.faults.append(
                f"</{tag}> closes {self.open[-1].tag if self.open else 'nothing'} at {self.getpos()}"
            )
        if self.open:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.open[-1].text += data


def read(html: str) -> Page:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    if reader.open:
        reader.page.faults.append(f"left open: {[element.tag for element in reader.open]}")
    return reader.page
