"""A run's files of JSON: appended line by line or replaced whole, never left half written, and
followed while they grow."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero_trial.errors import StorageError
from zero_trial.util.files import write_atomic


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line to ``path``. Raises StorageError where the disk does not take it.

    It is one write, so that a reader never sees half of a line followed by another's.
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file of JSON lines. A missing file has none; a torn line (its writer
    was killed) is left out."""
    return json_lines(path.read_text(encoding="utf-8", errors="replace").splitlines()) if path.exists() else []


def json_lines(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON objects among ``lines``. Anything else is passed over, since a reader must
    not end a run."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing, unreadable or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_lines(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite ``path`` without the records for which ``stays`` is false, and without torn lines.
    Raises StorageError."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [json.dumps(record) + "\n" for record in read_lines(path) if stays(record)]
    if kept != lines:
        _replace_file(path, "".join(kept))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Make ``value`` the whole content of ``path``, as ``replace_file`` does."""
    _replace_file(path, json.dumps(value, indent=1) + "\n")


def _replace_file(path: Path, text: str) -> None:
    """Make ``text`` the whole content of ``path``: written beside it, flushed to disk and renamed.
    Raises StorageError."""
    with _storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn the error of a disk that is full or broken into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"a file of the run cannot be written ({error.strerror or error})",
            where=str(path),
            fix="Free some space; the run goes on from its last checkpoint when it is started again.",
        ) from error


class Tail:
    """Reads what another process appends to a file, which may not exist yet.

    Args:
        skip_existing: begin with what is appended from now on.
        newest: begin so many bytes before the end.
    """

    def __init__(self, path: Path, *, skip_existing: bool = False, newest: int | None = None) -> None:
        self.path = path
        self._offset = 0
        if (skip_existing or newest is not None) and path.exists():
            self._offset = max(0, path.stat().st_size - (newest or 0))
        self._inode: int | None = None

    def replaced(self) -> bool:
        """Return whether the file has become shorter, or is another one than was read."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return self._offset > 0
        return stat.st_size < self._offset or self._inode not in (None, stat.st_ino)

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call, without their ends."""
        text = self._new(whole_lines=True)
        return text.decode("utf-8", errors="replace").splitlines() if text else []

    def rest(self) -> bytes:
        """Return all bytes since the last call, an unfinished line too."""
        return self._new(whole_lines=False)

    def _new(self, *, whole_lines: bool) -> bytes:
        try:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return b""
        if whole_lines:
            data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data
