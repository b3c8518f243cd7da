"""Count the changes that a process makes to files of one name, and kill all ranks at a chosen
moment.

A moment is the instant before a change: before a folder or a file is created, in the middle of
writing it, before it is flushed, before it is renamed or removed. Between two changes the disk does
not change, so these moments cover all of its states.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from zero_trial.checkpoint import writer

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


class Tap:
    """Call ``report(name)`` at each moment, and ``end()`` at number ``at`` (from 0). Only files
    whose path contains ``mark`` count."""

    def __init__(self, mark: str, at: int | None, report: Callable[[str], None], end: Callable[[], None]) -> None:
        self._mark = mark
        self._at = at
        self._report = report
        self._end = end
        self._count = 0
        self._inside = False
        self._fresh = False  # a file was created and is still empty
        self._done = False
        self._flushed: Callable[[int], None] = os.fsync

    def install(self) -> None:
        """Watch this process from now on."""
        sys.addaudithook(self._audit)
        os.fsync = self._fsync
        writer.sha256 = self._digest  # type: ignore[assignment]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside:
            return
        if event in _CHANGES:
            self._moment(event, arguments[0])
        elif (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            self._moment("begin", arguments[0])
            self._fresh = self._mark in str(arguments[0])

    def _fsync(self, handle: int) -> None:
        self._moment("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        self._flushed(handle)

    def _digest(self, data: bytes | None = None) -> Any:
        """Watch the checksums computed while a file is written; one of existing data is not a
        moment."""
        return _Digest(self._part) if data is None else hashlib.sha256(data)

    def _part(self) -> None:
        """Record that part of the file is written: a reader may see half of it."""
        fresh, self._fresh = self._fresh, False
        if fresh:
            self._moment("write", f"{self._mark}.tmp-/file")

    def _moment(self, what: str, path: Any) -> None:
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
        last = self._count > 0 and what == "fsync" and text.endswith("/checkpoints")
        if self._inside or self._done or (self._mark not in text and not last):
            return
        self._inside, self._done = True, last
        if self._at is None:
            self._report(f"{what} {_plain(text, self._mark)}")
        elif self._count == self._at:
            self._report(f"{what} {_plain(text, self._mark)}")
            self._end()
        self._count += 1
        self._inside = False


class _Digest:
    """A SHA-256 that reports before each update."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._sum = hashlib.sha256()
        self._report = report

    def update(self, data: Any) -> None:
        self._report()
        self._sum.update(data)

    def hexdigest(self) -> str:
        return self._sum.hexdigest()


_OWN = re.compile(r"\d+-[0-9a-f]{8}\.part$")  # a process and a random part


def _plain(text: str, mark: str) -> str:
    """Return the path from the marked folder on, without its random parts."""
    if mark not in text:
        return text.rsplit("/", 1)[-1]
    head, *rest = text[text.index(mark) :].split("/")
    kind = next((f"{head.split(part)[0]}{part}*" for part in (".tmp-", ".old-") if part in head), head)
    inner = [name.split(".tmp-")[0] + ".tmp-*" if ".tmp-" in name else _OWN.sub("*.part", name) for name in rest]
    return "/".join([kind, *inner])


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to all ranks, to this process last."""
    others = [pid for pid in pids if pid != os.getpid()]
    for pid in others:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)
