"""Output that verbs share: the end of a run, paths and progress bars."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from zero_trial.errors import ExitStatus
from zero_trial.launch.screen import is_terminal
from zero_trial.launch.supervisor import LaunchResult
from zero_trial.trial.runs.run_layout import RunFolder
from zero_trial.util.text import strip_control

FOLDER_HELP = "a checkpoint, or a run's folder or a folder of checkpoints (the newest intact checkpoint is used)"

_STOPPED = (ExitStatus.PREEMPTED, *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))


def report_outcome(outcome: LaunchResult, folder: Path, stream: TextIO) -> int:
    """Print the cause and the log of a failed or stopped run; print nothing after success.

    Returns the exit code.
    """
    cause = outcome.cause
    if cause is None:
        return outcome.exit_code
    word = "stopped" if outcome.exit_code in _STOPPED else "failed"
    first, *rest = strip_control(cause.headline).splitlines() or [f"exit code {outcome.exit_code}"]
    lines = [f"{word:<8}{first.removeprefix('stopped ')}", *(f"        {line}" for line in rest)]
    log = RunFolder(folder).log(cause.rank) if cause.rank is not None else RunFolder(folder).logs
    if word == "failed":
        lines.append(f"log     {shown(log)}")
        lines += disk_lines(folder)
    stream.write("\n".join(lines) + "\n")
    return outcome.exit_code


def disk_lines(folder: Path, room: int = 1 << 20) -> list[str]:
    """Return a note if the run's disk is full, because a rank may have failed without an error."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return []
    return (
        [f"note    the disk of {shown(folder)} is full ({free >> 10} KiB free): free some space, or pass --run-dir DIR"]
        if free < room
        else []
    )


def shown(path: Path) -> str:
    """Return a path for the user: relative if it is inside the current folder."""
    try:
        return strip_control(str(path.resolve().relative_to(Path.cwd())))
    except ValueError:
        return strip_control(str(path))


def say(text: str) -> None:
    """Print untrusted text, without terminal control characters."""
    print(strip_control(text))


def bytes_bar(word: str, total: int, *, quiet: bool = False) -> Any:
    """Return a tqdm bar over bytes that disappears on close, if stderr is a terminal."""
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
