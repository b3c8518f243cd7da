"""Find the line of the user's code at which an error was raised. Also detect errors of torch and
Python that mean out of memory, or that a process of a data loader has died."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from pathlib import Path
from types import FrameType

from zero_trial.errors import DoesNotFit, WorkerLost, ZeroTrialError

LONGEST_LINE = 90  # displayed characters of source

_PACKAGE = str(Path(__file__).parent.parent)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code; None if there is none."""
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    # drop frames without source (a dataclass's __init__), unless there are no others (python -c)
    theirs = [frame for frame in theirs if frame.filename != "<string>"] or theirs
    return theirs[-1] if theirs else None


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` below the message of ``error`` (on Python 3.10, to the message)."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)


def _is_users(filename: str) -> bool:
    if "site-packages" in filename or "dist-packages" in filename:
        return False
    return not filename.startswith(("<frozen", f"{_PACKAGE}/", sys.base_prefix + "/lib", sys.base_prefix + "/lib64"))


def line_being_run(frame: FrameType | None) -> str:
    """Return ``file:line`` of the user's innermost frame, starting at ``frame``, or ""."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def user_line(error: BaseException) -> str | None:
    """Return ``model_def.py:24 in train_batch: loss = self.engine(x)``; None without user code."""
    frame = user_frame(error)
    if frame is None:
        return None
    inside = "" if frame.name == "<module>" else f" in {frame.name}"
    source = (frame.line or "").strip()
    if len(source) > LONGEST_LINE:
        source = source[: LONGEST_LINE - 4] + " ..."
    return f"{Path(frame.filename).name}:{frame.lineno}{inside}{f': {source}' if source else ''}"


def with_user_line(message: str, error: BaseException) -> str:
    """Add the user's line to ``message`` in brackets: after it, or below a multi-line message."""
    line = user_line(error)
    if line is None:
        return message
    return f"{message}\n({line})" if "\n" in message else f"{message} ({line})"


_OF_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.\nOriginal ")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)
_NEXT = re.compile(r"\n\n(?:During handling of the above|The above) exception.+:\n\n(?=Traceback )")


def error_in_worker(error: BaseException) -> str | None:
    """Return the message of an error in a DataLoader's worker, with the user's line in that
    process; None for any other error.

    Parses the worker's traceback, which torch puts into the message.
    """
    text = str(error)
    worker = _OF_WORKER.match(text)
    if worker is None:
        return None
    shown = text[worker.end() :].rstrip()
    # the last traceback: its headline, its frames with their source, then the exception
    lines = _NEXT.split(shown)[-1].split("\n")
    first = next((i for i, line in enumerate(lines) if i and not line.startswith("  ")), 0)
    message = "\n".join(lines[first:])
    users = [found for found in _FRAME.findall(shown.removesuffix(message)) if _is_users(found[0])]
    place = f"{Path(users[-1][0]).name}:{users[-1][1]} in {users[-1][2]}, " if users else ""
    return message + ("\n" if "\n" in message else " ") + f"({place}{worker[1]})"


def known_fault(error: BaseException, where: str | None = None) -> ZeroTrialError | None:
    """Return DoesNotFit if ``error`` means out of memory, WorkerLost if a worker of a DataLoader
    has died, else None. ``where``: by default, the line of the user's code.

    torch raises the latter in the main thread at any point, even inside a collective.
    """
    said = str(error).strip()
    known: ZeroTrialError | None = None
    if _ran_out(error, said):
        said = _ALLOCATOR.sub("", (said.splitlines() or ["MemoryError"])[0])
        known = DoesNotFit(f"memory ran out: {said}", where=where or user_line(error), fix=LESS_MEMORY)
    elif isinstance(error, RuntimeError) and said.startswith("DataLoader worker (pid"):
        fix = (
            'Look for the worker\'s own message. "Killed" usually means that the host ran out of memory: use fewer num_workers, or 0 to see '
            "the error."
        )
        known = WorkerLost("a worker of a DataLoader has died", where=where, got=said.rstrip("."), fix=fix)
    if known is not None:
        known.__cause__ = error
    return known


_ALLOCATOR = re.compile(r"^\[enforce fail at [^]]*\] (err == 0)?[. ]*")  # before torch's message
LESS_MEMORY = (
    "Halve train_micro_batch_size_per_gpu and double gradient_accumulation_steps, or raise the ZeRO stage. "
    "zero-trial plan compares what fits."
)


def _ran_out(error: BaseException, said: str) -> bool:
    """Return whether the host or a device ran out of memory."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    of_torch = "DefaultCPUAllocator: " in said or "CUDA error: out of memory" in said
    return type(error).__name__ == "OutOfMemoryError" or (isinstance(error, RuntimeError) and of_torch)
