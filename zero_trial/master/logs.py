"""Lines of output on disk: one file per run of a trial, one JSON object per line, and how they are read back, also while they are written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_trial.master.records import LogLine
from zero_trial.master.verbs import LogQuery

FOLLOW_SECONDS = 0.2
"""How often a followed log is looked at."""

SILENCE_SECONDS = 1.0
"""After so long without a line a follower is given a None."""

MASTER = 0
"""The run under which the master's own lines about a trial are kept."""

_RANK = re.compile(r"^\[rank=(\d+)\] ")
_LEVEL = re.compile(r"\b(TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")


def path_of(folder: Path, run_id: int) -> Path:
    """The file of a run in the trial's folder of logs."""
    return folder / f"{run_id:06d}.jsonl"


def entry(message: str, at: float, stdtype: str = "stdout", **more: Any) -> bytes:
    """One line of the file."""
    return json.dumps({"t": at, "s": stdtype, "m": message, **more}, separators=(",", ":")).encode() + b"\n"


def append(path: Path, entries: Iterable[bytes]) -> None:
    """Add lines to a file in one write: writers of several processes do not cut into each other's lines."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, b"".join(entries))
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Source:
    """One trial's folder of logs and what its lines are signed with."""

    folder: Path
    trial_id: int
    task_id: str


def lines(source: Source, query: LogQuery) -> list[LogLine]:
    """The lines that are there now, filtered, ordered and limited."""
    found = [line for line in _Tail(source).new() if _wanted(line, query)]
    if query.newest_first:
        found.reverse()
    return found if query.limit is None else found[: query.limit]


def follow(source: Source, query: LogQuery, ended: Callable[[], bool]) -> Iterator[LogLine | None]:
    """Lines as they come, until ``ended`` and nothing is left. With ``newest_first`` and a limit: the newest lines, then what comes after.

    Yields None after a second without a line.
    """
    tail = _Tail(source)
    over = ended()
    first = [line for line in tail.new() if _wanted(line, query)]
    if query.limit is not None:
        first = first[-query.limit :] if query.newest_first else first[: query.limit]
    yield from first
    left = None if query.limit is None or query.newest_first else query.limit - len(first)
    silent = 0.0
    while not over and (left is None or left > 0):
        time.sleep(FOLLOW_SECONDS)
        over = ended()  # before reading: what was written until then is read
        fresh = [line for line in tail.new() if _wanted(line, query)]
        if left is not None:
            fresh = fresh[:left]
            left -= len(fresh)
        yield from fresh
        silent = 0.0 if fresh else silent + FOLLOW_SECONDS
        if silent >= SILENCE_SECONDS:
            silent = 0.0
            yield None


class _Tail:
    """Reads what is new in all files of a trial, lines that are not yet whole left for later."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read: dict[Path, int] = {}  # bytes
        self._time = 0.0  # of the line before

    def new(self) -> list[LogLine]:
        found: list[LogLine] = []
        for path in sorted(self._source.folder.glob("*.jsonl")):
            with contextlib.suppress(FileNotFoundError):  # its experiment was deleted at this moment
                found.extend(self._of(path))
        found.sort(key=lambda line: line.time)  # stable: a file's own order stays
        return found

    def _of(self, path: Path) -> Iterator[LogLine]:
        start = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read[path] = start + len(whole)
        place = start
        run_id = int(path.stem)
        for raw in whole.splitlines(keepends=True):
            yield self._line(raw, run_id, place)
            place += len(raw)

    def _line(self, raw: bytes, run_id: int, place: int) -> LogLine:
        try:
            data = json.loads(raw)
        except ValueError:  # its writer was killed in the middle of it
            data = {"m": raw.decode("utf-8", errors="replace").rstrip(), "t": self._time}
        message, at = data["m"], data["t"]
        self._time = at
        rank = _RANK.match(message)
        level = data.get("l") or (found[1] if (found := _LEVEL.search(message, 0, 80)) else "INFO")
        return LogLine(
            id=f"{int(at * 1e6):018d}-{run_id:06d}-{place:012d}",
            time=at,
            message=message,
            trial_id=self._source.trial_id,
            task_id=self._source.task_id,
            allocation_id=f"{self._source.task_id}.{run_id}" if run_id else "",
            rank=data.get("r", int(rank[1]) if rank else None),
            level=level,
            stdtype=data.get("s", "stdout"),
            source="task" if run_id else "master",
        )


def _wanted(line: LogLine, query: LogQuery) -> bool:
    return (
        (query.since is None or line.time >= query.since)
        and (query.until is None or line.time <= query.until)
        and (not query.levels or line.level in query.levels)
        and (not query.rank_ids or line.rank in query.rank_ids)
        and (not query.search or query.search in line.message)
        and (not query.allocation_ids or line.allocation_id in query.allocation_ids)
    )
