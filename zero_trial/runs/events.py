"""The folder of one run: its files, appended line by line or replaced whole, never left half written."""

from __future__ import annotations

from pathlib import Path
from collections.abc import Mapping
from typing import Any
import json
import os
import errno
from contextlib import contextmanager
from collections.abc import Iterator
from zero_trial.errors import StorageError
from collections.abc import Callable
import tempfile

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


# A file that another process appends to, read piece by piece as it grows.


class Tail:
    """Reads whole new lines of a file that may not exist yet; an unfinished last line waits for its end."""

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if skip_existing and path.exists() else 0

    def lines(self) -> list[str]:
        """The lines that were completed since the last call, without their ends."""
        text = self._new(whole_lines=True)
        return text.decode("utf-8", errors="replace").splitlines() if text else []

    def rest(self) -> bytes:
        """Everything since the last call, an unfinished line too."""
        return self._new(whole_lines=False)

    def _new(self, *, whole_lines: bool) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return b""
        if whole_lines:
            data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data


def json_lines(lines: list[str]) -> list[dict[str, Any]]:
    """The objects among lines of JSON; anything else is passed over, since a watcher must not end a run."""
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
