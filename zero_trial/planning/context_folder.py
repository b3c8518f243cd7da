"""Measure the model's folder after ``.detignore`` against Determined's limit for uploads."""

from __future__ import annotations

import heapq
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pathspec

from zero_trial.errors import ConfigError
from zero_trial.planning.issues import Area, CheckIssue, Severity, note
from zero_trial.util.text import format_bytes

# What Determined leaves out by itself, by its meaning: compiled Python, version control, editors,
# caches, terraform, its shared mount.
ALWAYS = (
    *("__pycache__/", "*.py[co]", "*$py.class", ".git/", ".vscode/", ".idea/", ".mypy_cache/", "/shared_fs"),
    *("terraform", "terraform_data", "terraform.tfstate*", "terraform.tfvars*", ".terraform*"),
)

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
    folders not entered. Raises ConfigError for a line that is no pattern.
    """
    listed = folder / ".detignore"
    own = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    try:
        ignored = pathspec.PathSpec.from_lines("gitignore", (*ALWAYS, *own))
    except (ValueError, re.error) as error:
        raise ConfigError("there is a line that is no pattern", where=str(listed), got=str(error)) from error
    sizes: list[tuple[int, str]] = []
    for parent, folders, files in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        folders[:] = sorted(name for name in folders if not ignored.match_file(f"{(inside / name).as_posix()}/"))
        for name in files:
            path = (inside / name).as_posix()
            if name != ".detignore" and not ignored.match_file(path):
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
