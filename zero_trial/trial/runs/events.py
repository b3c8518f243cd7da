"""A run's JSON files: appended line by line or replaced as a whole, never left half written, and
followed while they grow; and figures of a run that several readers need."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from zero_trial.errors import StorageError
from zero_trial.util.files import write_atomic
from zero_trial.util.text import format_bytes

_MOST_BYTES = 32 << 20  # of a file that is read completely
_LONGEST_LINE = 4 << 20  # bytes

COUNTERS = ("batches", "epochs")
"""Validation metrics that only the searcher needs: users read the step instead."""

ENGINE_GROUP = "engine"
"""The metric group on a master that holds the metrics of PROGRESS."""

PROGRESS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "samples_per_second": "samples per second",
    "mfu": "MFU",
}
"""Fields that the engine adds to a ``train`` event, with their display names."""


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line to ``path``. Raises StorageError if it cannot be written.

    A single write, so that a reader never sees a partial line followed by another writer's line.
    """
    line = (json.dumps(record) + "\n").encode()
    with _storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raise OSError for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe waits for its writer otherwise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, most: int = _MOST_BYTES) -> str:
    """Return the text of a regular file of at most ``most`` bytes. Raises OSError."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {format_bytes(most)}", str(path))
    return data.decode("utf-8", errors="replace")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSON lines file, skipping torn ones; empty if the file is missing."""
    return list(json_lines(Tail(path).lines()))


def json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among ``lines``; skip anything else."""
    return (value for line in lines if (value := json_line(line)) is not None)


def json_line(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line is anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if the file is missing, unreadable or anything else."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_lines(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite ``path`` without torn lines and records to remove. Raises StorageError."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [json.dumps(record) + "\n" for record in read_lines(path) if stays(record)]
    if kept != lines:
        _replace_file(path, "".join(kept))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path``'s content by ``value``, as ``replace_file`` does."""
    _replace_file(path, json.dumps(value, indent=1) + "\n")


def _replace_file(path: Path, text: str) -> None:
    """Replace ``path``'s content by ``text``, flushed and renamed. Raises StorageError."""
    with _storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Convert the error of a full or failed disk into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"a file of the run cannot be written ({error.strerror or error})",
            where=str(path),
            fix="Free some space; the run goes on from its last checkpoint when it is started again.",
        ) from error


class Tail:
    """Reads what another process appends to a regular file, which may not exist yet. Lines longer
    than 4 MiB are skipped. Raises OSError if the file cannot be read.

    Args:
        skip_existing: only read what is appended from now on.
        newest: start this many bytes before the end.
        most: maximum number of bytes to read.

    Attributes:
        left_out: a text about unread parts of the file; empty if there are none.
    """

    def __init__(
        self, path: Path, *, skip_existing: bool = False, newest: int | None = None, most: int | None = None
    ) -> None:
        self.path = path
        self.left_out = ""
        self._most = most
        self._offset = 0
        if (skip_existing or newest is not None) and path.exists():
            self._offset = max(0, path.stat().st_size - (newest or 0))
        self._in_long_line = False

    def lines(self) -> Iterator[str]:
        """Yield the lines completed since the last call, without their line ends."""
        try:
            file = self._open()
        except FileNotFoundError:
            return
        with file:
            while line := file.readline(_LONGEST_LINE):
                if self._most is not None and self._offset >= self._most:
                    self.left_out = f"everything after the first {format_bytes(self._most)}"
                    return
                whole = line.endswith(b"\n")
                if not whole and len(line) < _LONGEST_LINE:
                    return
                self._offset += len(line)
                if whole and not self._in_long_line:
                    yield from line.decode("utf-8", errors="replace").splitlines()
                elif whole:
                    self.left_out = f"lines of more than {format_bytes(_LONGEST_LINE)}"
                self._in_long_line = not whole

    def rest(self) -> str:
        """Return the start of an unfinished line after the last of ``lines``."""
        try:
            with self._open() as file:
                data = file.read(_LONGEST_LINE)
        except FileNotFoundError:
            return ""
        self._offset += len(data)
        return data.decode("utf-8", errors="replace")

    def _open(self) -> BinaryIO:
        file = open_regular(self.path)
        file.seek(self._offset)
        return file


# Figures of a run.


def baselines(metric: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """Find the figures in summary.json that measure the same quantity in another way, by the prefix
    of their names.

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
    """Return the figures of a run, with the largest measured memory of it and of the earlier runs
    that it resumed. Pure.

    Memory use is compared rank by rank. ``memory_plan_error_percent`` is computed from the result.
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
    """Return whether ``value`` is a number that a float can represent."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
