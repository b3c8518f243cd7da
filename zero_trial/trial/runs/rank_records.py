"""The errors that the ranks of a run leave in its folder for the supervisor, in
``<run>/errors/rank-<r>.json``, and figures of a run that several of its readers need.

A record is renamed into place, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from zero_trial.errors import ZeroTrialError
from zero_trial.trial.runs.events import write_json
from zero_trial.trial.runs.run_layout import RunFolder

COUNTERS = ("batches", "epochs")
"""Validation metrics for the searcher alone: people read the step instead."""


ENGINE_GROUP = "engine"
"""The metric group on a master that holds the metrics of PROGRESS."""

PROGRESS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "samples_per_second": "samples per second",
}
"""Fields that the engine adds to a ``train`` event, with their display names."""


@dataclass(frozen=True)
class ErrorRecord:
    """Why a rank ended.

    Attributes:
        message: what the user reads.
        expected: the error is one of this package, whose message says what to do.
        time: seconds since the epoch; the earliest error is the cause of the others.
        step: optimizer steps that were complete, where the rank knew it.
    """

    rank: int
    type: str
    message: str
    exit_code: int
    time: float
    step: int | None = None
    expected: bool = False


def error_record(error: BaseException, rank: int, message: str, step: int | None = None) -> ErrorRecord:
    """Make the record of ``error``, which ends this rank now."""
    known = isinstance(error, ZeroTrialError)
    code = error.exit_code if isinstance(error, ZeroTrialError) else 1
    return ErrorRecord(rank, type(error).__name__, message, code, time.time(), step, known)


def write_error(run_dir: Path, record: ErrorRecord) -> None:
    """Write the error of one rank, unless it has left one already: the first one is the cause.
    Raises StorageError."""
    path = RunFolder(run_dir).error(record.rank)
    if not path.exists():
        write_json(path, asdict(record))


def read_errors(run_dir: Path) -> list[ErrorRecord]:
    """Read the errors left so far, in the order of the ranks; a missing field gets its default."""
    return [_error(json.loads(path.read_text(encoding="utf-8"))) for path in RunFolder(run_dir).error_files()]


def baselines(metric: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """Find the figures of summary.json that measure the same quantity in another way, by what is
    before its name.

    ``unigram_bits_per_byte`` is a baseline of ``val_bits_per_byte``, and ``chance_accuracy`` one of
    ``accuracy``.
    """
    quantity = metric.removeprefix("validation_").removeprefix("val_")
    measured = summary.get("final_validation") or {}
    return {
        key.removesuffix(f"_{quantity}").replace("_", " "): float(value)
        for key, value in summary.items()
        if key.endswith(f"_{quantity}") and key not in measured and is_finite(value)
    }


def join_memory(figures: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run with the largest measured memory of it and of earlier parts of
    the same run, which was resumed; pure.

    What ranks have used is compared rank by rank. ``memory_plan_error_percent`` follows.
    """
    joined, peaks = dict(figures), list(figures.get("peak_memory_bytes") or ())
    for part in earlier:
        for name in ("memory_measured_peak_bytes", "memory_measured_states_bytes"):
            if is_finite(part.get(name)):
                joined[name] = max(joined.get(name) or 0, part[name])
        peaks = [max(pair) for pair in zip_longest(peaks, part.get("peak_memory_bytes") or (), fillvalue=0)]
    planned, measured = joined.get("memory_planned_bytes"), joined.get("memory_measured_peak_bytes")
    if planned and measured:
        joined["memory_plan_error_percent"] = round(100 * (planned / measured - 1), 2)
    return {**joined, "peak_memory_bytes": peaks} if peaks else joined


_LARGEST = sys.float_info.max


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is a number that can be drawn; an integer may be larger than any
    float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _error(data: Mapping[str, Any]) -> ErrorRecord:
    step = data.get("step")
    return ErrorRecord(
        rank=int(data.get("rank", 0)),
        type=str(data.get("type", "Error")),
        message=str(data.get("message", "")),
        exit_code=int(data.get("exit_code", 1)),
        time=float(data.get("time", 0.0)),
        step=None if step is None else int(step),
        expected=bool(data.get("expected", False)),
    )
