"""The model's folder as a cluster would be sent it: its size after ``.detignore``, against Determined's limit."""

from __future__ import annotations

import heapq
import os
from dataclasses import dataclass
from pathlib import Path

from zero_trial.checking.finding import Area, Finding, Severity, remark
from zero_trial.checking.ignore import ALWAYS, Ignore

LIMIT = 128 * 2**20 // 8 * 6 - 2**20
"""Bytes; Determined 0.38.1's MAX_CONTEXT_SIZE: what 128 MiB hold in base64, less 1 MiB for the envelope."""

MOST_FILES = 200_000


@dataclass(frozen=True)
class ContextFolder:
    """``largest``: the five largest files, (bytes, path), the largest first. ``complete`` is False where counting was given up."""

    path: Path
    size: int
    files: int
    largest: tuple[tuple[int, str], ...]
    complete: bool = True


def measure(folder: Path, most_files: int = MOST_FILES) -> ContextFolder:
    """Walk ``folder`` as ``det experiment create`` does: links to folders are not followed, ignored folders not entered."""
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


def check_context(context: ContextFolder, for_cluster: bool) -> list[Finding]:
    """A folder that is too large is a fault where the experiment is one for a cluster, and worth a word where it is not. Pure."""
    if context.complete and context.size <= LIMIT:
        return []
    listed = ", ".join(f"{path} ({shown_size(size)})" for size, path in context.largest)
    first = context.largest[0][1] if context.largest else "data/"
    what = f"the folder is too large to be sent to a cluster: {context.files} files; the largest are {listed}"
    severity = Severity.FAULT if for_cluster else Severity.WARNING
    got = f"{shown_size(context.size)}{'' if context.complete else ' and more'}"
    fix = f"Name what the trial does not need in {context.path / '.detignore'}, for example: {first}"
    return [
        remark(
            Area.CONTEXT,
            severity,
            what,
            where=f"MODEL_DIR {context.path}",
            got=got,
            expected=f"at most {shown_size(LIMIT)}",
            fix=fix,
        )
    ]


def shown_size(size: int) -> str:
    """Bytes as a person reads them."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a link that leads nowhere
        return 0
