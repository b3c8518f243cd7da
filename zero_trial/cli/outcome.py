"""How the end of a supervised run is shown: the failing rank's words once, where its log is, and the exit code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TextIO

from zero_trial.launch.run_folder import LOGS
from zero_trial.launch.supervisor import PREEMPTED, Outcome
from zero_trial.util.text import strip_control


def report_outcome(outcome: Outcome, folder: Path, stream: TextIO) -> int:
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
