"""Lines of output on disk: one file per run of a trial, one JSON object per line; also how they are
read back, while they are written too, and searched for the patterns of ``log_policies``.

Files are read in blocks from either end, so the cost depends on the lines that are read and not on
the length of the file.
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

BLOCK = 64 * 1024  # bytes that are read at a time
Line = tuple[int, bytes]  # where it begins, and its bytes with the newline

FOLLOW_SECONDS = 0.2  # between two reads of a followed log
SILENCE_SECONDS = 1.0  # after so long without a line a follower gets None
MASTER = 0  # the run under which the master's own lines about a trial are kept
_RANK = re.compile(r"^\[rank=(\d+)\] ")
_LEVEL = re.compile(r"\b(TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")


@dataclass(frozen=True)
class LogLine:
    """One line of output. ``id`` rises with the line and can be used to go on after it."""

    id: str
    time: float
    message: str  # without the newline
    trial_id: int
    task_id: str
    allocation_id: str
    container_id: str = ""  # empty, as agent_id, for lines that the master adds
    agent_id: str = ""
    rank: int | None = None
    level: str = "INFO"  # TRACE, DEBUG, INFO, WARNING, ERROR or CRITICAL
    has_level: bool = False  # it came with the line, and was not found in its text
    stdtype: str = "stdout"
    source: str = "task"  # or "master", for lines that the master adds


@dataclass(frozen=True)
class LogQuery:
    """A query for log lines; with ``follow`` its answer ends with the trial."""

    follow: bool = False
    limit: int | None = None  # of the oldest lines, or with ``newest_first`` of the newest
    newest_first: bool = False
    since: float | None = None  # lines at or after
    until: float | None = None  # lines at or before
    search: str = ""  # a plain substring
    # field of LogLine -> the values that pass; of "rank", -1 is a line without one
    among: Mapping[str, Collection[str | int]] = field(default_factory=dict)
    task_id: str = ""  # the master's own lines belong to each task of a trial


def path_of(folder: Path, run_id: int, node: int = 0) -> Path:
    """Return the file of a run in the trial's folder of logs; each of its nodes has one."""
    return folder / (f"{run_id:06d}-{node}.jsonl" if node else f"{run_id:06d}.jsonl")


def entry(message: str, at: float, stdtype: str = "stdout", **more: Any) -> bytes:
    """Return one line of the file."""
    return json.dumps({"t": at, "s": stdtype, "m": message, **more}, separators=(",", ":")).encode() + b"\n"


def append(path: Path, entries: Iterable[bytes]) -> None:
    """Append lines in one write, usually, so that several writers do not mix them."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        left = memoryview(b"".join(entries))
        while left:  # a write may be short: the disk is nearly full, or a signal came
            left = left[os.write(handle, left) :]
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Source:
    """The folder of one trial's logs, and the ids that its lines carry."""

    folder: Path
    trial_id: int
    task_id: str

    def names(self, run_id: int, node: int = 0) -> dict[str, str]:
        """Return the ids of a run on one of its nodes, as fields of LogLine."""
        return {"task_id": self.task_id, "allocation_id": f"{self.task_id}.{run_id}" if run_id else ""}


def lines(source: Source, query: LogQuery) -> Iterator[LogLine]:
    """Return the lines that are there now, filtered, ordered and limited.

    They are read as they are consumed, from the end with ``newest_first``.
    """
    found = _newest_first(source, _ends(source)) if query.newest_first else LogTail(source).new()
    return islice((line for line in found if _wanted(line, query)), query.limit)


def follow(source: Source, query: LogQuery, ended: Callable[[], bool]) -> Iterator[LogLine | None]:
    """Yield lines as they come, until ``ended`` and nothing is left; None after a second without a
    line.

    With ``newest_first`` and a limit: the newest lines first, then what comes after them.
    """
    tail = LogTail(source)
    over = ended()  # before reading: what was written until then is read
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
    """Return the end of the last complete line of each file, in bytes."""
    return {path: end_of_lines(path) for path in sorted(source.folder.glob("*.jsonl"))}


def _newest_first(source: Source, ends: Mapping[Path, int]) -> Iterator[LogLine]:
    """Yield the lines before ``ends``, the newest first."""
    readers = [_Reader(source, path).lines(backward(path, end)) for path, end in reversed(list(ends.items())) if end]
    return heapq.merge(*readers, key=lambda line: line.time, reverse=True)


class LogTail:
    """Reads what is new in all files of a trial; incomplete lines are left for later."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._read: dict[Path, int] = {}  # bytes
        self._readers: dict[Path, _Reader] = {}

    def new(self) -> Iterator[LogLine]:
        """Return the lines since the last call, by time; those of one file stay in their order."""
        paths = sorted(self._source.folder.glob("*.jsonl"))
        for path in paths:
            if path not in self._readers:
                self._readers[path] = _Reader(self._source, path)
        found = [self._readers[path].lines(self._counted(path)) for path in paths]
        return heapq.merge(*found, key=lambda line: line.time)

    def newest_first(self) -> Iterator[LogLine]:
        """Return the lines that are there now, the newest first; `new` goes on after them."""
        self._read = _ends(self._source)
        return _newest_first(self._source, dict(self._read))

    def _counted(self, path: Path) -> Iterator[Line]:
        for place, raw in forward(path, self._read.get(path, 0)):
            self._read[path] = place + len(raw)
            yield place, raw


class _Reader:
    """Converts the lines of one file."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        run, _, node = path.stem.partition("-")
        self._run_id = int(run)
        self._names = source.names(self._run_id, int(node or 0))
        self._time = 0.0  # of the line before

    def lines(self, found: Iterable[Line]) -> Iterator[LogLine]:
        """Convert lines as they are found."""
        return (self._line(raw, place) for place, raw in found)

    def _line(self, raw: bytes, place: int) -> LogLine:
        run_id = self._run_id
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


# -- a file of lines, read in blocks


def forward(path: Path, start: int = 0) -> Iterator[Line]:
    """Yield the complete lines from byte ``start`` on, oldest first. A missing file has none."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):
                yield start, line
                start += len(line)


def backward(path: Path, before: int | None = None) -> Iterator[Line]:
    """Yield the complete lines before byte ``before`` (default: the file's end), newest first.

    What follows the last newline is not complete yet, and is left out.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        place = file.seek(0, 2) if before is None else before
        held: list[bytes] = []  # blocks of a line whose beginning is not read, the last one first
        ended = False  # a newline follows what is held
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
    """Return the byte after the last newline; 0 if there is none."""
    return next((place + len(line) for place, line in backward(path)), 0)


# An experiment's ``log_policies``: patterns that are searched in the lines of its trials' logs.
#
# ``cancel_retries``: a trial that fails is not started again. ``exclude_node``: no run of the task
# is placed again on the machine that printed the line. A policy's name becomes the trial's
# ``logPolicyMatched``. The supervisor of a run matches what it prints, and records the first match
# of each policy in a file of the allocation, which the master reads while the run goes on and after
# it.

CANCEL_RETRIES, EXCLUDE_NODE = "cancel_retries", "exclude_node"
_MATCHES_FILE = "log_matches.jsonl"
# a line that prints the configuration, also as text in JSON, holds every pattern
_PRINTED_CONFIG = re.compile(r"""["']log_policies\\*["']:""")
_LONGEST_MATCH = 1000  # characters of a line that are kept


@dataclass(frozen=True)
class LogPolicy:
    """A pattern in RE2's syntax, as Go's; ``action`` and ``name`` are empty where there is none."""

    pattern: str
    action: str = ""
    name: str = ""


@dataclass(frozen=True)
class LogMatch:
    """The first line that a policy has matched in a run."""

    policy: LogPolicy
    line: str

    def __str__(self) -> str:
        return f'(log {json.dumps(self.line, ensure_ascii=False)} matched regex "{self.policy.pattern}")'


def policies_of(config: Mapping[str, Any]) -> list[LogPolicy]:
    """Return the policies with a pattern of a completed config, in both of its forms."""
    found = []
    for item in config.get("log_policies") or ():
        action = item.get("action")
        word = action.get("type") if isinstance(action, Mapping) else action
        if item.get("pattern") is not None:
            found.append(LogPolicy(str(item["pattern"]), str(word or ""), str(item.get("name") or "")))
    return found


def why_no_retry(matches: Iterable[LogMatch]) -> str:
    """Return why a trial that fails is not started again; "" if it is."""
    found = " ".join(str(match) for match in matches if match.policy.action == CANCEL_RETRIES)
    return f"trial failed and matched logs to a don't retry policy {found}" if found else ""


def why_excluded(matches: Iterable[LogMatch], node: str) -> str:
    """Return why a task is not placed on the machine ``node`` again; "" if it is."""
    found = " ".join(str(match) for match in matches if match.policy.action == EXCLUDE_NODE)
    return f"{found} therefore will not schedule on {node}" if found else ""


class LogMatcher:
    """Searches lines for the patterns that have not matched yet."""

    def __init__(self, policies: Iterable[LogPolicy]) -> None:
        self._open = [(policy, compile_pattern(policy.pattern)[0]) for policy in policies]

    def match(self, lines: Sequence[str]) -> list[LogMatch]:
        """Return the new matches, each policy's first, in the order of the lines."""
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
    """Add matches to the file of an allocation, in one write."""
    append(
        folder / _MATCHES_FILE,
        [json.dumps({**asdict(match.policy), "line": match.line}).encode() + b"\n" for match in matches],
    )


def read_matches(folder: Path, start: int) -> tuple[list[LogMatch], int]:
    """Read the matches of an allocation from byte ``start`` on, and return where they end."""
    path = folder / _MATCHES_FILE
    if not path.exists() or path.stat().st_size <= start:
        return [], start
    data = path.read_bytes()[start:]
    whole = data[: data.rfind(b"\n") + 1]
    items = [json.loads(line) for line in whole.splitlines()]
    return [LogMatch(LogPolicy(**item), line) for item in items for line in [item.pop("line")]], start + len(whole)
