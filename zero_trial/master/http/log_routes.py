"""Routes of logs: lines of trials, tasks and the master itself, as streams that can be followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from zero_trial.experiment.sections import compile_pattern
from zero_trial.master.http.messages import (
    AuthLevel,
    Dict,
    Request,
    Response,
    Route,
    StreamingResponse,
    failure,
    fields,
    lines,
    when,
    whole,
)
from zero_trial.master.logs import LogLine, LogQuery
from zero_trial.master.records import Invalid
from zero_trial.util.text import strip_control

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_WRITTEN_LEVEL = re.compile(r" ?(DEBUG|INFO|WARNING|ERROR|CRITICAL): ?")  # at the beginning of a line
_ENTRY = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z?) ([A-Z]+) (.*)")
_TAIL = 1024 * 1024  # bytes of the master's log that are read at most
# instructions of a compiled searchText; the time for a line grows with them
_LARGEST_PROGRAM = 1000
_FILTERS = {
    "allocation_id": "allocationIds",
    "container_id": "containerIds",
    "agent_id": "agentIds",
    "source": "sources",
    "stdtype": "stdtypes",
}


def _query(request: Request) -> LogQuery:
    """Read which lines a request asks for. Raises Invalid."""
    limit = request.query_number("limit")
    among: dict[str, list[Any]] = {
        "level": [level.removeprefix("LOG_LEVEL_") for level in request.query_all("levels")],
        "rank": [whole(text, "rankIds") for text in request.query_all("rankIds")],
        **{name: request.query_all(asked) for name, asked in _FILTERS.items()},
    }
    return LogQuery(
        follow=request.query_flag("follow"),
        limit=limit if limit > 0 else None,
        newest_first=request.descending,
        since=request.query_time("timestampAfter"),
        until=request.query_time("timestampBefore"),
        search="" if request.query_flag("enableRegex") else request.first("searchText"),
        among={name: values for name, values in among.items() if values},
    )


def _stream(
    request: Request, read: Callable[[LogQuery], Iterator[LogLine | None]], shape: Callable[[LogLine], Dict]
) -> Response | StreamingResponse:
    asked = _query(request)
    text = request.first("searchText") if request.query_flag("enableRegex") else ""
    if not text:
        found = read(asked)
    else:
        # RE2 matches in a time that is linear in the line and holds no lock of the interpreter
        # meanwhile; with ``re``, ``(a+)+$`` on one line would stop every thread of the master
        pattern, why = compile_pattern(text)
        if why:
            raise Invalid(f"searchText is not a regular expression (RE2 syntax): {why}")
        if pattern.programsize > _LARGEST_PROGRAM:
            raise Invalid("searchText is too large a regular expression", fix="Use fewer and smaller repetitions.")
        lines_read = read(replace(asked, limit=None))  # the limit counts lines that pass every filter
        everything = (line for line in lines_read if line is None or pattern.search(line.message) is not None)
        found = islice(everything, asked.limit) if asked.limit is not None else everything
    if not asked.follow:
        return lines((shape(line) for line in found if line is not None), follow=False)
    place = ExitStack()  # one of those of requests that wait, until the stream ends
    if not place.enter_context(request.waits.one()):
        return failure(503, "too many logs are being followed already, try again")
    return lines((None if line is None else shape(line) for line in found), follow=True, done=place.close)


def _shared(line: LogLine) -> Dict:
    """Render what the lines of trials and of tasks have in common.

    Clients print ``message`` as it is, as Determined's master formats it; ``log`` is the bare
    text.
    """
    # `det trial logs` prints it to a terminal, which ignores a NUL
    text = "\0".join(strip_control(part) for part in line.message.split("\0"))
    rank = "" if line.rank is None else f"[rank={line.rank}] "
    text = shown = text.removeprefix(rank)
    level = line.level if line.level in _LEVELS else "INFO"  # trials send any text
    found = None if line.has_level else _WRITTEN_LEVEL.match(text)
    if line.has_level:
        shown = f"{level}: {text}"
    elif found is not None:
        text = text[found.end() :]
        shown = f"{found[1]}: {text}"
    time = when(line.time, "microseconds")
    return {
        **fields(line, "id", "source", "stdtype"),
        "timestamp": time,
        "message": f"[{time}] {line.container_id[:8]:8} {rank}|| {shown}\n",
        "log": text,
        "agentId": line.agent_id or None,
        "containerId": line.container_id or None,
        "level": f"LOG_LEVEL_{level}",
        "rankId": line.rank,
    }


def _trial_logs(request: Request) -> Response | StreamingResponse:
    return _stream(
        request,
        lambda asked: request.master.trials.logs(request.number, asked),
        lambda line: {**_shared(line), "trialId": line.trial_id},
    )


def _task_logs(request: Request) -> Response | StreamingResponse:
    return _stream(
        request,
        lambda asked: request.master.tasks.logs(request.args["taskId"], asked),
        lambda line: {**_shared(line), **fields(line, "task_id", "allocation_id")},
    )


def _master_logs(request: Request) -> Response | StreamingResponse:
    """Return entries of the master's log; a negative offset counts from the end. Following is left
    to ``zero-trial master logs``.
    """
    if request.query_flag("follow"):
        return failure(501, "the master's log is not followed over HTTP: run 'zero-trial master logs'")
    entries = list(_entries(request.master.machine.log_file))
    offset, limit = request.query_number("offset"), request.query_number("limit")
    kept = entries[offset:] if offset < 0 else entries[min(offset, len(entries)) :]
    return lines(({"logEntry": entry} for entry in (kept[:limit] if limit > 0 else kept)), follow=False)


def _entries(file: Path) -> Iterator[Dict]:
    """Read the last entries; a line without a time belongs to the entry before it."""
    try:
        with file.open("rb") as stream:
            start = max(0, stream.seek(0, 2) - _TAIL)
            stream.seek(start)
            text = stream.read(_TAIL).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    entry: Dict | None = None
    number = 0
    for line in text.splitlines():
        matched = _ENTRY.match(line)
        if matched is None:
            if entry is not None:
                entry["message"] += "\n" + line
            continue
        if entry is not None:
            yield entry
        level = matched[2] if matched[2] in _LEVELS else "INFO"
        entry = {"id": number, "timestamp": matched[1], "level": f"LOG_LEVEL_{level}", "message": matched[3]}
        number += 1
    if entry is not None:
        yield entry


def _post_logs(request: Request) -> None:
    """Store the log lines of core_v2 in an unmanaged trial."""
    by_task: dict[str, list[dict[str, object]]] = {}
    for line in request.list_body():
        if not isinstance(line, dict):
            raise Invalid("logs must be a list of lines")
        task_id = line.get("task_id")
        if not isinstance(task_id, str):
            raise Invalid("a log line has no task_id")
        request.own(task_id=task_id)
        rank = line.get("rank", line.get("rankId"))
        line = {**line, "rankId": None if rank is None else whole(rank, "rankId")}
        by_task.setdefault(task_id, []).append(line)
    for task_id, some in by_task.items():
        request.master.tasks.append_logs(task_id, some)


ROUTES = (
    Route("POST", "/task-logs", _post_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/trials/{trialId:int}/logs", _trial_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/tasks/{taskId}/logs", _task_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/master/logs", _master_logs),
)
