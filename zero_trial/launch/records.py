"""What the ranks of a run leave in its folder for the supervisor: who they are, how they ended, what went wrong.

``<run>/ranks/rank-<r>.json`` is written when a rank starts and again when it ends; ``<run>/errors/rank-<r>.json`` when
it fails. Both are renamed into place, so a reader never sees half a record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_trial.launch.run_folder import ERRORS, RANKS


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
