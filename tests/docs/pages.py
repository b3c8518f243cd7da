"""Read the commands and programs of a guide, and compare what a command prints with what it shows.

A page says what is checked in the language of its code fences:

- ``console``: lines with ``$`` are typed, and the lines below each are what it prints. A line
  ``...`` stands for any number of lines, ``...`` or ``…`` inside a line for anything. Times, sizes,
  fractions, dates and hashes are not compared.
- ``sh``: each line is typed and must succeed.
- ``python``, ``json``, ``yaml``: the text must be readable.

A comment of HTML above a fence, invisible on the page, says more, with one of these on each line:

    <!-- docs-check:
    first COMMAND           type this before, and do not show it; it must succeed
    file NAME               write the fence's text to this file of the page's folder
    run                     execute the fence, a Python program, after those of the page before it
    sketch                  the fence is not valid in its language
    fails PATTERN           the commands that the pattern is found in must fail, not succeed
    needs WHAT              do not type its commands here, because they need this; they are counted
    needs WHAT: PATTERN     the same for the commands that the pattern is found in
    -->
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

# What an indented block may not begin with: such a command would not be checked.
_COMMANDS = ("$", "zero-trial", "det", "python", "python3", "pip", "make", "eval", "torchrun", "git", "source", "cd")
_WORDS = ("first", "file", "run", "sketch", "fails", "needs")
_CHECKED = ("console", "sh", "bash", "python", "json", "yaml", "text")


class PageError(ValueError):
    """A page cannot be checked; the text says where and why."""


@dataclass(frozen=True)
class Command:
    """A command that a page shows. ``shown`` is what it prints there, None where that is not
    shown."""

    line: int
    text: str
    shown: tuple[str, ...] | None = None
    needs: str | None = None
    fails: bool = False


@dataclass(frozen=True)
class Fence:
    """A code fence with the directives above it. ``line`` is that of its first line of text."""

    line: int
    language: str
    text: str
    first: tuple[str, ...] = ()
    file: str | None = None
    run: bool = False
    sketch: bool = False
    fails: str | None = None
    needs: tuple[tuple[str, str], ...] = ()

    def commands(self) -> Iterator[Command]:
        """Yield the commands in the fence."""
        if self.language not in ("console", "sh") or self.file is not None:
            return
        shown: list[str] | None = None
        text, line = "", 0
        for number, raw in enumerate(self.text.split("\n"), self.line):
            typed = raw.startswith("$ ") if self.language == "console" else bool(raw.strip())
            if text.endswith("\\"):
                text = f"{text[:-1]}{raw.strip()}"
            elif typed:
                if text:
                    yield self._command(line, text, shown)
                shown = None
                text, line = raw.removeprefix("$ ").strip(), number
            elif text and (raw.strip() or shown):
                shown = [*(shown or ()), raw]
        if text:
            yield self._command(line, text, shown)

    def _command(self, line: int, text: str, shown: list[str] | None) -> Command:
        while shown and not shown[-1].strip():
            shown.pop()
        needs = next((what for what, pattern in self.needs if re.search(pattern, text)), None)
        return Command(
            line, text, tuple(shown) if shown else None, needs, bool(self.fails and re.search(self.fails, text))
        )


def read_page(path: Path) -> list[Fence]:
    """Return the fences of a page in their order.

    Raises:
        PageError: for commands outside of a fence, unknown directives, and text that its language
            does not allow.
    """
    fences: list[Fence] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    said: list[str] = []
    number, blank, listed = 0, True, False
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.strip().startswith("<!-- docs-check:"):
            start = number
            while "-->" not in lines[number - 1]:
                number += 1
            said = _directives("\n".join(lines[start - 1 : number]), f"{path}:{start}")
        elif opening := re.match(r"( *)```(\S*)\s*$", line):
            end = next((at for at in range(number, len(lines)) if lines[at].strip() == "```"), None)
            if end is None:
                raise PageError(f"{path}:{number}: the fence does not end")
            text = textwrap.dedent("\n".join(lines[number:end]))
            fences.append(_fence(path, number + 1, opening[2], text, said))
            said, number = [], end + 1
        elif line.startswith("    ") and blank and not listed and line.split()[0] in _COMMANDS:
            raise PageError(f"{path}:{number}: a command in an indented block is not checked; use ```console or ```sh")
        elif line.strip():
            if said:
                raise PageError(f"{path}:{number}: a docs-check comment must stand above a code fence")
            listed = bool(re.match(r"\s*([-*]|\d+\.)\s", line)) or (listed and line.startswith(" "))
        blank = not line.strip()
    return fences


def _directives(comment: str, where: str) -> list[str]:
    inside = comment.strip().removeprefix("<!-- docs-check:").removesuffix("-->")
    said = [line.strip() for line in inside.split("\n") if line.strip()]
    for line in said:
        if line.split()[0] not in _WORDS:
            raise PageError(f"{where}: unknown directive {line.split()[0]!r}; known: {', '.join(_WORDS)}")
    return said


def _fence(path: Path, line: int, language: str, text: str, said: Sequence[str]) -> Fence:
    if language not in _CHECKED:
        raise PageError(f"{path}:{line}: the fence's language is {language!r}; known: {', '.join(_CHECKED)}")
    values = {word: [text[len(word) :].strip() for text in said if text.split()[0] == word] for word in _WORDS}
    needs = tuple(
        (what.strip(), pattern.strip()) for what, _, pattern in (each.partition(":") for each in values["needs"])
    )
    file, fails = (values[word][0] if values[word] else None for word in ("file", "fails"))
    fence = Fence(line, language, text, tuple(values["first"]), file, "run" in said, "sketch" in said, fails, needs)
    if not fence.sketch:
        _readable(fence, path)
    return fence


def _readable(fence: Fence, path: Path) -> None:
    try:
        if fence.language == "python":
            ast.parse(fence.text)
        elif fence.language == "json":
            json.loads(fence.text if fence.text.lstrip().startswith("{") else f"{{{fence.text}}}")
        elif fence.language == "yaml":
            yaml.safe_load(fence.text)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        raise PageError(f"{path}:{fence.line}: this {fence.language} cannot be read: {error}") from None


_ELIDED = (
    (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "#"),  # an identifier
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.]*Z?", "#"),  # a date
    (r"(?<![\w.])(?=[a-f]*\d)[0-9a-f]{8,}\b", "#"),  # a hash
    (r"(?<![\w.])[+-]?\d[\d.,]*[kM]?(?= ?(?:s|ms|B|KiB|MiB|GiB|%|cores?|threads?|samples/s|tok/s)(?![\w]))", "#"),
    (r"# (?:B|KiB|MiB|GiB)\b", "# B"),
    (r"(?<![\w.])[+-]?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)k?\b", "#"),  # a fraction
    (r"\b\d\d:\d\d:\d\d\b", "#"),  # a time of day
    (r"\s+", " "),
)


def elide(line: str) -> str:
    """Return a line without what differs from one run to the next."""
    for pattern, by in _ELIDED:
        line = re.sub(pattern, by, line)
    return line.strip()


def first_difference(shown: Sequence[str], printed: Sequence[str]) -> tuple[str, str] | None:
    """Compare what a page shows with what the command printed.

    Returns:
        The first shown line that was not printed and the printed line in its place, either of which
        can be empty at the end; None if they agree.
    """
    wanted, got = ([(each, line) for line in lines if (each := elide(line))] for lines in (shown, printed))
    patterns = [_pattern(each) for each, _ in wanted]
    text = "".join(f"{each}\n" for each, _ in got)
    if re.fullmatch("".join(patterns), text):
        return None
    fits = (at for at in range(len(wanted), -1, -1) if re.match("".join(patterns[:at]), text))
    at = next(fits)  # so many shown lines were printed; "..." took as few lines as it could
    line = text.count("\n", 0, re.match("".join(patterns[:at]), text).end())  # type: ignore[union-attr]
    return (wanted[at][1] if at < len(wanted) else ""), (got[line][1] if line < len(got) else "")


def _pattern(wanted: str) -> str:
    if wanted in ("...", "…"):
        return r"(?:.*\n)*?"
    return ".*".join(re.escape(part) for part in re.split(r"\.\.\.|…", wanted)) + r"\n"


def inline_commands(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line and words of each ``zero-trial ...`` in the running text of a page."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    for found in re.finditer(r"(?<!`)`(zero-trial [^`]+)`", text):
        yield text.count("\n", 0, found.start()) + 1, shlex.split(found[1].replace("\n", " "))[1:]
