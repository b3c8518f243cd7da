"""The last line of the user's own code on the way to an error: where to look first."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

LONGEST = 90  # characters of source that are shown

_OURS = str(Path(__file__).parent.parent)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that is not Python's, an installed package's or this package's; None where there is none."""
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return theirs[-1] if theirs else None


def _is_own(filename: str) -> bool:
    if "site-packages" in filename or "dist-packages" in filename:
        return False
    return not filename.startswith(("<frozen", f"{_OURS}/", sys.base_prefix + "/lib", sys.base_prefix + "/lib64"))


def own_line(error: BaseException) -> str | None:
    """``model_def.py:24 in train_batch: loss = self.engine(x)``; None where none of the user's lines is on the way."""
    frame = own_frame(error)
    if frame is None:
        return None
    inside = "" if frame.name == "<module>" else f" in {frame.name}"
    source = (frame.line or "").strip()
    if len(source) > LONGEST:
        source = source[: LONGEST - 4] + " ..."
    return f"{Path(frame.filename).name}:{frame.lineno}{inside}{f': {source}' if source else ''}"


def with_own_line(words: str, error: BaseException) -> str:
    """``words`` with the line in brackets: behind them, or below where they are several lines."""
    line = own_line(error)
    if line is None:
        return words
    return f"{words}\n({line})" if "\n" in words else f"{words} ({line})"
