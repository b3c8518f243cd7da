"""A file that another process appends to, read piece by piece as it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
