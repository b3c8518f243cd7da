"""Log files: one file per run of a trial, one JSON object per line. This module writes them, reads
and follows them, and searches them for the patterns of ``log_policies``.

Files are read in blocks from either end, so that the cost depends on the number of lines read, not
on the length of the file.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from zero_trial.experiment.sections import compile_pattern

BLOCK = 64 * 1024  # bytes per read
Line = tuple[int, bytes]  # its offset in the file, and its bytes including the newline

FOLLOW_SECONDS = 0.2  # between two reads of a followed log
SILENCE_SECONDS = 1.0  # a follower gets None after this long without a line
MASTER = 0  # the run id of the master's own lines about a trial
_RANK = re.compile(r"^\[rank=(\d+)\] ")
_LEVEL = re.compile(r"\b(TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")


@dataclass(frozen=True)
class LogLine:
    """One line of output. ``id`` increases with each line, and readers can resume after it."""

    id: str
    time: float
    message: str  # without the newline
    trial_id: int
    task_id: str
    allocation_id: str
    container_id: str = ""  # this and agent_id are empty for lines of the master
    agent_id: str = ""
    rank: int | None = None
    level: str = "INFO"  # TRACE, DEBUG, INFO, WARNING, ERROR or CRITICAL
    has_level: bool = False  # whether the writer set the level; otherwise it is guessed from the text
    stdtype: str = "stdout"
    source: str = "task"  # or "master", for lines of the master


@dataclass(frozen=True)
class LogQuery:
    """A query for log lines. With ``follow``, the result ends when the trial ends."""

    follow: bool = False
    limit: int | None = None  # of the oldest lines, or of the newest with ``newest_first``
    newest_first: bool = False
    since: float | None = None  # lines at or after
    until: float | None = None  # lines at or before
    search: str = ""  # a plain substring
    # field of LogLine -> accepted values; for "rank", -1 means a line without a rank
    among: Mapping[str, Collection[str | int]] = field(default_factory=dict)
    task_id: str = ""  # lines of the master belong to every task of a trial


def path_of(folder: Path, run_id: int, node: int = 0) -> Path:
    """Return the log file of a run in the trial's log folder; each node has its own file."""
    return folder / (f"{run_id:06d}-{node}.jsonl" if node else f"{run_id:06d}.jsonl")


def entry(message: str, at: float, stdtype: str = "stdout", **more: Any) -> bytes:
    """Return one line of a log file."""
    return json.dumps({"t": at, "s": stdtype, "m": message, **more}, separators=(",", ":")).encode() + b"\n"


def append(path: Path, entries: Iterable[bytes]) -> None:
    """Append lines, usually in one write, so that lines of concurrent writers do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        left = memoryview(b"".join(entries))
        while left:  # a write may be short if the disk is nearly full or a signal arrives
            left = left[os.write(handle, left) :]
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Source:
    """The log folder of one trial, and the ids for its lines."""

    folder: Path
    trial_id: int
    task_id: str

    def names(self, run_id: int, node: int = 0) -> dict[str, str]:
        """Return the ids of a run on one of its nodes, as fields of LogLine."""
        return {"task_id": self.task_id, "allocation_id": f"{self.task_id}.{run_id}" if run_id else ""}


def lines(source: Source, query: LogQuery) -> Iterator[LogLine]:
    """Return the existing lines, filtered, ordered and limited.

    Lines are read lazily as the iterator is consumed; with ``newest_first``, from the end.
    """
    found = _newest_first(source, _ends(source)) if query.newest_first else LogTail(source).new()
    return islice((line for line in found if _wanted(line, query)), query.limit)


def follow(source: Source, query: LogQuery, ended: Callable[[], bool]) -> Iterator[LogLine | None]:
    """Yield lines as they arrive, until ``ended`` returns True and no line is left. Yield None
    after each second without a line.

    With ``newest_first`` and a limit, yield the newest existing lines first, then all new lines.
    """
    tail = LogTail(source)
    over = ended()  # check before reading, so that all lines written until then are read
    if query.newest_first and query.limit is not None:
        newest = (line for line in tail.newest_first() if _wanted(line, query))
        yield from reversed(list(islice(newest, query.limit)))
    left = None if query.newest_first else query.limit
    silent = 0.0
    while True:
        fresh = 0
        for line in islice((line for line in tail.new() if _wanted(line, query)), left):
            fresh += 1
            yield line
        left = None if left is None else left - fresh
        silent = 0.0 if fresh else silent + FOLLOW_SECONDS
        if over or left == 0:
            return
        if silent >= SILENCE_SECONDS:
            silent = 0.0
            yield None
        time.sleep(FOLLOW_SECONDS)
        over = ended()


def _ends(source: Source) -> dict[Path, int]:
    """Return the offset after the last complete line of each file."""
    return {path: end_of_lines(path) for path in sorted(source.folder.glob("*.jsonl"))}


def _newest_first(source: Source, ends: Mapping[Path, int]) -> Iterator[LogLine]:
    """Yield the lines before ``ends``, newest first."""
    readers = [_Reader(source, path).lines(backward(path, end)) for path, end in reversed(list(ends.items())) if end]
    return heapq.merge(*readers, key=lambda line: line.time, reverse=True)


class LogTail:
    """Reads new lines from all files of a trial; incomplete lines are left for a later call."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read: dict[Path, int] = {}  # bytes
        self._readers: dict[Path, _Reader] = {}

    def new(self) -> Iterator[LogLine]:
        """Return the lines since the last call, by time; lines of one file keep their order."""
        paths = sorted(self._source.folder.glob("*.jsonl"))
        for path in paths:
            if path not in self._readers:
                self._readers[path] = _Reader(self._source, path)
        found = [self._readers[path].lines(self._counted(path)) for path in paths]
        return heapq.merge(*found, key=lambda line: line.time)

    def newest_first(self) -> Iterator[LogLine]:
        """Return the existing lines, newest first; `new` then continues after them."""
        self._read = _ends(self._source)
        return _newest_first(self._source, dict(self._read))

    def _counted(self, path: Path) -> Iterator[Line]:
        for place, raw in forward(path, self._read.get(path, 0)):
            self._read[path] = place + len(raw)
            yield place, raw


class _Reader:
    """Parses the lines of one file."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        run, _, node = path.stem.partition("-")
        self._run_id = int(run)
        self._names = source.names(self._run_id, int(node or 0))
        self._time = 0.0  # of the previous line

    def lines(self, found: Iterable[Line]) -> Iterator[LogLine]:
        """Parse lines lazily."""
        return (self._line(raw, place) for place, raw in found)

    def _line(self, raw: bytes, place: int) -> LogLine:
        run_id = self._run_id
        try:
            data = json.loads(raw)
        except ValueError:  # the writer was killed while writing this line
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
            **self._names,
            rank=data.get("r", int(rank[1]) if rank else None),
            level=level,
            has_level="l" in data,
            stdtype=data.get("s", "stdout"),
            source="task" if run_id else "master",
        )


def _wanted(line: LogLine, query: LogQuery) -> bool:
    asked = [(getattr(line, name), values) for name, values in query.among.items()]
    return (
        (query.since is None or line.time >= query.since)
        and (query.until is None or line.time <= query.until)
        and (not query.search or query.search in line.message)
        and (not query.task_id or line.task_id == query.task_id)
        and all((-1 if value is None else value) in values for value, values in asked)
    )


# -- reading a file of lines in blocks


def forward(path: Path, start: int = 0) -> Iterator[Line]:
    """Yield complete lines from byte ``start`` on, oldest first; none if the file is missing."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):
                yield start, line
                start += len(line)


def backward(path: Path, before: int | None = None) -> Iterator[Line]:
    """Yield the complete lines before byte ``before`` (default: the file's end), newest first.

    An incomplete line after the last newline is omitted.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        place = file.seek(0, 2) if before is None else before
        held: list[bytes] = []  # blocks of a line whose start was not read yet, last block first
        ended = False  # whether a newline follows the held blocks
        while place > 0:
            size = min(BLOCK, place)
            place -= size
            file.seek(place)
            held.append(file.read(size))
            if b"\n" not in held[-1]:
                continue
            first, *whole = b"".join(reversed(held)).split(b"\n")
            end = place + len(first) + 1 + sum(len(line) + 1 for line in whole)
            for line in reversed(whole):
                end -= len(line) + 1
                if ended:
                    yield end, line + b"\n"
                ended = True
            held = [first]
        if ended:
            yield 0, b"".join(reversed(held)) + b"\n"


def end_of_lines(path: Path) -> int:
    """Return the offset after the last newline; 0 if there is none."""
    return next((place + len(line) for place, line in backward(path)), 0)


# An experiment's ``log_policies``: patterns to search for in the logs of its trials.
#
# ``cancel_retries``: do not restart a failed trial. ``exclude_node``: place no further run of
# the task on the machine that printed the line. The policy's name becomes the trial's
# ``logPolicyMatched``. The supervisor of a run matches the output, and records the first match of
# each policy in a file of the allocation. The master reads this file during and after the run.

CANCEL_RETRIES, EXCLUDE_NODE = "cancel_retries", "exclude_node"
_MATCHES_FILE = "log_matches.jsonl"
# a line that prints the configuration (also as a JSON string) contains every pattern: skip it
_PRINTED_CONFIG = re.compile(r"""["']log_policies\\*["']:""")
_LONGEST_MATCH = 1000  # maximum characters to store of a matching line


@dataclass(frozen=True)
class LogPolicy:
    """A pattern in RE2 syntax (as in Go). ``action`` and ``name`` are empty if not set."""

    pattern: str
    action: str = ""
    name: str = ""


@dataclass(frozen=True)
class LogMatch:
    """The first line in a run that matches a policy."""

    policy: LogPolicy
    line: str

    def __str__(self) -> str:
        return f'(log {json.dumps(self.line, ensure_ascii=False)} matched regex "{self.policy.pattern}")'


def policies_of(config: Mapping[str, Any]) -> list[LogPolicy]:
    """Return the policies of a completed config that have a pattern, from either syntax."""
    found = []
    for item in config.get("log_policies") or ():
        action = item.get("action")
        word = action.get("type") if isinstance(action, Mapping) else action
        if item.get("pattern") is not None:
            found.append(LogPolicy(str(item["pattern"]), str(word or ""), str(item.get("name") or "")))
    return found


def why_no_retry(matches: Iterable[LogMatch]) -> str:
    """Return why a failed trial is not restarted; "" if it is restarted."""
    found = " ".join(str(match) for match in matches if match.policy.action == CANCEL_RETRIES)
    return f"trial failed and matched logs to a don't retry policy {found}" if found else ""


def why_excluded(matches: Iterable[LogMatch], node: str) -> str:
    """Return why a task is not placed on machine ``node`` again; "" if it may be placed there."""
    found = " ".join(str(match) for match in matches if match.policy.action == EXCLUDE_NODE)
    return f"{found} therefore will not schedule on {node}" if found else ""


class LogMatcher:
    """Searches lines for patterns that have not matched yet."""

    def __init__(self, policies: Iterable[LogPolicy]) -> None:
        self._open = [(policy, compile_pattern(policy.pattern)[0]) for policy in policies]

    def match(self, lines: Sequence[str]) -> list[LogMatch]:
        """Return new matches, the first one of each policy, in line order."""
        found = []
        for line in lines if self._open else ():
            if _PRINTED_CONFIG.search(line):
                continue
            hits = [item for item in self._open if item[1].search(line) is not None]
            for item in hits:
                self._open.remove(item)
                found.append(LogMatch(item[0], line[:_LONGEST_MATCH]))
        return found


def record_matches(folder: Path, matches: Iterable[LogMatch]) -> None:
    """Append matches to the file of an allocation, in one write."""
    append(
        folder / _MATCHES_FILE,
        [json.dumps({**asdict(match.policy), "line": match.line}).encode() + b"\n" for match in matches],
    )


def read_matches(folder: Path, start: int) -> tuple[list[LogMatch], int]:
    """Return an allocation's matches from byte ``start`` on, and the offset after them."""
    path = folder / _MATCHES_FILE
    if not path.exists() or path.stat().st_size <= start:
        return [], start
    data = path.read_bytes()[start:]
    whole = data[: data.rfind(b"\n") + 1]
    items = [json.loads(line) for line in whole.splitlines()]
    return [LogMatch(LogPolicy(**item), line) for item in items for line in [item.pop("line")]], start + len(whole)
