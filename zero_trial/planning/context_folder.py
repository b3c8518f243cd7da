"""Measure the model's folder after ``.detignore`` against Determined's limit for uploads."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zero_trial.planning.issues import Area, CheckIssue, Severity, note
from zero_trial.util.text import format_bytes

# What Determined leaves out by itself, by its meaning: compiled Python, version control, editors,
# caches, terraform, its shared mount.
ALWAYS = (
    *("__pycache__/", "*.py[co]", "*$py.class", ".git/", ".vscode/", ".idea/", ".mypy_cache/", "/shared_fs"),
    *("terraform", "terraform_data", "terraform.tfstate*", "terraform.tfvars*", ".terraform*"),
)


@dataclass(frozen=True)
class Pattern:
    """One line.

    ``keeps``: it began with ``!`` and takes paths back in; ``folders``: it ended with ``/`` and is
    about folders only.
    """

    regex: re.Pattern[str]
    keeps: bool
    folders: bool


@dataclass(frozen=True)
class Ignore:
    """The last pattern that matches a path decides."""

    patterns: tuple[Pattern, ...]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Ignore:
        """Make the patterns of ``lines``; comments and empty lines are none."""
        return cls(tuple(pattern for line in lines if (pattern := read_pattern(line)) is not None))

    def ignores(self, path: str, folder: bool) -> bool:
        """Return whether ``path``, relative and with ``/`` between its parts, is ignored. Not asked
        for what is inside an ignored folder.
        """
        answer = False
        for pattern in self.patterns:
            if (folder or not pattern.folders) and pattern.regex.fullmatch(path):
                answer = not pattern.keeps
        return answer


def read_pattern(line: str) -> Pattern | None:
    """Return the pattern in a line, or None."""
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


LIMIT = 128 * 2**20 // 8 * 6 - 2**20
"""Bytes; Determined 0.38.1's MAX_CONTEXT_SIZE: what 128 MiB hold in base64, less 1 MiB for the
envelope."""

MOST_FILES = 200_000


@dataclass(frozen=True)
class ContextFolder:
    """``largest``: the five largest files, (bytes, path), the largest first.

    ``complete`` is False where counting was given up.
    """

    path: Path
    size: int
    files: int
    largest: tuple[tuple[int, str], ...]
    complete: bool = True


def measure(folder: Path, most_files: int = MOST_FILES) -> ContextFolder:
    """Walk ``folder`` as ``det experiment create`` does: links to folders are not followed, ignored
    folders not entered.
    """
    listed = folder / ".detignore"
    own = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    ignore = Ignore.of((*ALWAYS, *own))
    sizes: list[tuple[int, str]] = []
    for parent, folders, files in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        folders[:] = sorted(name for name in folders if not ignore.ignores((inside / name).as_posix(), folder=True))
        for name in files:
            path = (inside / name).as_posix()
            if name != ".detignore" and not ignore.ignores(path, folder=False):
                sizes.append((_size(Path(parent, name)), path))
        if len(sizes) > most_files:
            break
    largest = tuple(heapq.nlargest(5, sizes))
    return ContextFolder(folder, sum(size for size, _ in sizes), len(sizes), largest, len(sizes) <= most_files)


def check_context(context: ContextFolder, for_cluster: bool) -> list[CheckIssue]:
    """Return the issue of a folder that is too large: a fault where the experiment is one for a
    cluster, else a warning. Pure.
    """
    if context.complete and context.size <= LIMIT:
        return []
    listed = ", ".join(f"{path} ({format_bytes(size)})" for size, path in context.largest)
    first = context.largest[0][1] if context.largest else "data/"
    what = f"the folder is too large to be sent to a cluster: {context.files} files; the largest are {listed}"
    severity = Severity.FAULT if for_cluster else Severity.WARNING
    got = f"{format_bytes(context.size)}{'' if context.complete else ' and more'}"
    fix = f"Name what the trial does not need in {context.path / '.detignore'}, for example: {first}"
    return [
        note(
            Area.CONTEXT,
            severity,
            what,
            where=f"MODEL_DIR {context.path}",
            got=got,
            expected=f"at most {format_bytes(LIMIT)}",
            fix=fix,
        )
    ]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a link that leads nowhere
        return 0
