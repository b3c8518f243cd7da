"""The last line of the user's own code on the way to an error: where to look first."""

from __future__ import annotations

from pathlib import Path
import traceback
import sys
from dataclasses import dataclass
from zero_trial.runs.layout import RANKS
from dataclasses import asdict
from zero_trial.runs.layout import ERRORS
from collections.abc import Mapping
from typing import Any
import os
import json
from zero_trial.errors import ZeroTrialError
from zero_trial.errors import Preempted
from zero_trial.runs.layout import RunFolder

LONGEST = 90  # characters of source that are shown


_OURS = str(Path(__file__).parent.parent)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that is not Python's, an installed package's or this package's; None where there is none."""
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return theirs[-1] if theirs else None


def _is_own(filename: str) -> bool:
    if "site-packages" in filename or "dist-packages" in filename:
        return False
    return not filename.startswith(("<frozen", f"{_OURS}/", sys.base_prefix + "/lib", sys.base_prefix + "/lib64"))


def user_line(error: BaseException) -> str | None:
    """``model_def.py:24 in train_batch: loss = self.engine(x)``; None where none of the user's lines is on the way."""
    frame = user_frame(error)
    if frame is None:
        return None
    inside = "" if frame.name == "<module>" else f" in {frame.name}"
    source = (frame.line or "").strip()
    if len(source) > LONGEST:
        source = source[: LONGEST - 4] + " ..."
    return f"{Path(frame.filename).name}:{frame.lineno}{inside}{f': {source}' if source else ''}"


def with_user_line(words: str, error: BaseException) -> str:
    """``words`` with the line in brackets: behind them, or below where they are several lines."""
    line = user_line(error)
    if line is None:
        return words
    return f"{words}\n({line})" if "\n" in words else f"{words} ({line})"


# What the ranks of a run leave in its folder for the supervisor: who they are, how they ended, what went wrong.
#
# ``<run>/ranks/rank-<r>.json`` is written when a rank starts and again when it ends; ``<run>/errors/rank-<r>.json`` when
# it fails. Both are renamed into place, so a reader never sees half a record.


@dataclass(frozen=True)
class RankRecord:
    """One rank's process. ``exit_code`` is None while it runs, and stays None when it was killed; ``watched`` is False for a foreign program."""

    rank: int
    local_rank: int
    pid: int
    watched: bool = True
    exit_code: int | None = None
    host: str = ""


@dataclass(frozen=True)
class ErrorRecord:
    """Why a rank ended: ``message`` is what the user shall read, ``time`` is seconds since the epoch."""

    rank: int
    type: str
    message: str
    exit_code: int
    time: float
    step: int | None = None


def write_rank(run_dir: Path, record: RankRecord) -> None:
    """Write or replace the record of one rank."""
    _write(run_dir / RANKS / f"rank-{record.rank}.json", asdict(record))


def write_error(run_dir: Path, record: ErrorRecord) -> None:
    """Write the error of one rank, unless it has left one already: the first one is the cause."""
    path = run_dir / ERRORS / f"rank-{record.rank}.json"
    if not path.exists():
        _write(path, asdict(record))


def read_ranks(run_dir: Path) -> list[RankRecord]:
    """Records of the ranks that have started so far, by rank."""
    return sorted((RankRecord(**data) for data in _read_all(run_dir / RANKS)), key=lambda record: record.rank)


def read_errors(run_dir: Path) -> list[ErrorRecord]:
    """Errors left so far, by rank; fields that are missing are filled with what is known."""
    return sorted((_error(data) for data in _read_all(run_dir / ERRORS)), key=lambda record: record.rank)


def _error(data: Mapping[str, Any]) -> ErrorRecord:
    step = data.get("step")
    return ErrorRecord(
        rank=int(data.get("rank", 0)),
        type=str(data.get("type", "Error")),
        message=str(data.get("message", "")),
        exit_code=int(data.get("exit_code", 1)),
        time=float(data.get("time", 0.0)),
        step=None if step is None else int(step),
    )


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(path)


def _read_all(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]


def error_record(error: BaseException, rank: int, step: int | None, now: float) -> dict[str, Any]:
    """What ``errors/rank-<r>.json`` says of a failure."""
    known = isinstance(error, ZeroTrialError)
    return {
        "rank": rank,
        "step": step,
        "type": type(error).__name__,
        "message": str(error) if known else f"{type(error).__name__}: {error}",
        "exit_code": error.exit_code if isinstance(error, ZeroTrialError) else 1,
        "expected": known,
        "time": now,
    }


def has_failed_ranks(run_dir: Path) -> bool:
    """Whether a rank of the run has left an error; one that was asked to stop and has saved is none."""
    codes = [read_exit_code(path) for path in _error_files(run_dir)]
    return any(code != Preempted.exit_code for code in codes)


def read_exit_code(path: Path) -> int | None:
    """What an error's record says; None for one that cannot be read."""
    try:
        return int(json.loads(path.read_text())["exit_code"])
    except (OSError, ValueError, KeyError):
        return None


def _error_files(run_dir: Path) -> list[Path]:
    return [path for path in RunFolder(run_dir).error(0).parent.glob("rank-*.json") if path.stem[5:].isdigit()]
