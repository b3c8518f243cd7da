"""The patterns of a ``.detignore`` file (those of ``.gitignore``): which paths are not sent to a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# What Determined leaves out by itself, by its meaning: compiled Python, version control, editors, caches, terraform, its shared mount.
ALWAYS = (
    *("__pycache__/", "*.py[co]", "*$py.class", ".git/", ".vscode/", ".idea/", ".mypy_cache/", "/shared_fs"),
    *("terraform", "terraform_data", "terraform.tfstate*", "terraform.tfvars*", ".terraform*"),
)


@dataclass(frozen=True)
class Pattern:
    """One line. ``keeps``: it began with ``!`` and takes paths back in; ``folders``: it ended with ``/`` and is about folders only."""

    regex: re.Pattern[str]
    keeps: bool
    folders: bool


@dataclass(frozen=True)
class Ignore:
    """The last pattern that matches a path decides."""

    patterns: tuple[Pattern, ...]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Ignore:
        """Comments and empty lines are no patterns."""
        return cls(tuple(pattern for line in lines if (pattern := read_pattern(line)) is not None))

    def ignores(self, path: str, folder: bool) -> bool:
        """``path`` is relative, with ``/`` between its parts. What lies in an ignored folder is not asked about: nobody walks into it."""
        answer = False
        for pattern in self.patterns:
            if (folder or not pattern.folders) and pattern.regex.fullmatch(path):
                answer = not pattern.keeps
        return answer


def read_pattern(line: str) -> Pattern | None:
    """The pattern in a line, or None."""
    text = line.rstrip("\r\n").rstrip(" ")
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text.removeprefix("!")
    if text.startswith(("\\#", "\\!")):
        text = text[1:]
    folders = text.endswith("/")
    text = text.rstrip("/")
    anchored = "/" in text
    text = text.removeprefix("/")
    if not text:
        return None
    return Pattern(re.compile(("" if anchored else "(?:.*/)?") + _regex(text), re.DOTALL), keeps, folders)


def _regex(glob: str) -> str:
    found, at = "", 0
    while at < len(glob):
        rest = glob[at:]
        if rest.startswith("**/") and (at == 0 or glob[at - 1] == "/"):
            found, at = found + "(?:.*/)?", at + 3
        elif rest == "**" and (at == 0 or glob[at - 1] == "/"):
            found, at = found + ".+", at + 2
        elif rest[0] == "*":
            found, at = found + "[^/]*", at + 1
        elif rest[0] == "?":
            found, at = found + "[^/]", at + 1
        elif rest[0] == "[" and (end := rest.find("]", 2)) > 0:
            inner = rest[1:end].replace("\\", "\\\\").replace("[", "\\[")
            found, at = found + "[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]", at + end + 1
        elif rest[0] == "\\" and len(rest) > 1:
            found, at = found + re.escape(rest[1]), at + 2
        else:
            found, at = found + re.escape(rest[0]), at + 1
    return found
