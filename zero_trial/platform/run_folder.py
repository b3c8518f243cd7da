"""The folder of one run: its files, appended line by line or replaced whole, never left half written."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.errors import StorageError, ZeroTrialError


@dataclass(frozen=True)
class RunFolder:
    """Names of the files in a run's folder, and the two ways to write them."""

    path: Path

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def preempt(self) -> Path:
        """Whoever wants the run to save and stop creates this file."""
        return self.path / "preempt"

    def error(self, rank: int) -> Path:
        return self.path / "errors" / f"rank-{rank}.json"


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """One JSON line at the end of ``path``, in a single write, so that a reader never sees half a line followed by
    another's. Raises StorageError where the disk does not take it.
    """
    line = (json.dumps(record) + "\n").encode()
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """A disk that is full or broken, as an error for people."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"a file of the run cannot be written ({error.strerror or error})",
            where=str(path),
            fix="Free some space; the run goes on from its last checkpoint when it is started again.",
        ) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; a torn last line (the writer was killed) is left out.

    A missing file has none.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def keep_lines(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrites ``path`` without the records that do not stay, and without torn lines. Nothing if all do, or there is no file."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [json.dumps(record) + "\n" for record in read_lines(path) if stays(record)]
    if kept != lines:
        replace_file(path, "".join(kept))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """``value`` as the whole content of ``path``."""
    replace_file(path, json.dumps(value, indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """``text`` as the whole content of ``path``: written beside it, flushed to disk and renamed. Raises StorageError."""
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


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
