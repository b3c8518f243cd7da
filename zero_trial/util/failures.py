"""The line of the user's own code at which an error arose: where to look first."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

LONGEST_LINE = 90  # characters of source that are shown

_PACKAGE = str(Path(__file__).parent.parent)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame outside of Python, installed packages and this package; None where
    there is none."""
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return theirs[-1] if theirs else None


def _is_users(filename: str) -> bool:
    if "site-packages" in filename or "dist-packages" in filename:
        return False
    return not filename.startswith(("<frozen", f"{_PACKAGE}/", sys.base_prefix + "/lib", sys.base_prefix + "/lib64"))


def user_line(error: BaseException) -> str | None:
    """Return ``model_def.py:24 in train_batch: loss = self.engine(x)``; None where no frame is the
    user's."""
    frame = user_frame(error)
    if frame is None:
        return None
    inside = "" if frame.name == "<module>" else f" in {frame.name}"
    source = (frame.line or "").strip()
    if len(source) > LONGEST_LINE:
        source = source[: LONGEST_LINE - 4] + " ..."
    return f"{Path(frame.filename).name}:{frame.lineno}{inside}{f': {source}' if source else ''}"


def with_user_line(message: str, error: BaseException) -> str:
    """Add that line to ``message`` in brackets: behind it, or below where it has several lines."""
    line = user_line(error)
    if line is None:
        return message
    return f"{message}\n({line})" if "\n" in message else f"{message} ({line})"
