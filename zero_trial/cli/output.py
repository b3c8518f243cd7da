"""How the end of a supervised run is shown: the failing rank's words once, where its log is, and the exit code."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TextIO

from zero_trial.launch.screen import is_terminal
from zero_trial.launch.supervisor import PREEMPTED, LaunchResult
from zero_trial.runs.layout import LOGS
from zero_trial.util.text import strip_control


def report_outcome(outcome: LaunchResult, folder: Path, stream: TextIO) -> int:
    """Print what ended a run that failed, and nothing for one that did not; returns the exit code."""
    cause = outcome.cause
    if cause is None:
        return outcome.exit_code
    word = "stopped" if outcome.exit_code in (PREEMPTED, 128 + 2, 128 + 15, 128 + 1) else "failed"
    first, *rest = strip_control(cause.headline).splitlines() or [f"exit code {outcome.exit_code}"]
    lines = [f"{word:<8}{first.removeprefix('stopped ')}", *(f"        {line}" for line in rest)]
    log = folder / LOGS / (f"rank-{cause.rank}.log" if cause.rank is not None else "")
    if word == "failed":
        lines.append(f"log     {shown(log)}")
        lines += disk_lines(folder)
    stream.write("\n".join(lines) + "\n")
    return outcome.exit_code


def disk_lines(folder: Path, room: int = 1 << 20) -> list[str]:
    """That the run's disk is full, where it is: then a rank could not leave its last words."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return []
    return (
        [f"note    the disk of {shown(folder)} is full ({free >> 10} KiB free): free some, or give --run-dir DIR"]
        if free < room
        else []
    )


def shown(path: Path) -> str:
    """A path as the user would type it: relative to here where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# Rows of text in columns that stand under each other.


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """One line per row, columns two blanks apart; ``right``: the columns that stand to the right (numbers)."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# A bar of bytes for what takes long on big files; nothing where nobody watches.


def bytes_bar(word: str, total: int, *, quiet: bool = False) -> Any:
    """A tqdm bar on stderr that goes away when it is closed. ``update(bytes)`` moves it."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        disable=quiet or not is_terminal(sys.stderr),
        file=sys.stderr,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        dynamic_ncols=True,
        leave=False,
        ascii=".#",
        bar_format=f"{word:<8}" + "{n_fmt}B/{total_fmt}B |{bar:24}| {rate_fmt}  eta {remaining}",
    )
