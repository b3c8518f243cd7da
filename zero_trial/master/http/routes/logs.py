"""Routes of logs: lines of trials, tasks and the master itself, as streams that can be followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import re2

from zero_trial.master.http.messages import (
    AuthLevel,
    Dict,
    Request,
    Response,
    Route,
    StreamingResponse,
    failure,
    lines,
    when,
    whole,
)
from zero_trial.master.records import Invalid, LogLine, LogQuery
from zero_trial.util.text import strip_control

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_ENTRY = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z?) ([A-Z]+) (.*)")
_TAIL = 1024 * 1024  # bytes of the master's log that are read at most
# instructions of a compiled searchText; the time for a line grows with them
_LARGEST_PROGRAM = 1000


def _query(request: Request) -> LogQuery:
    """Read which lines a request asks for. Raises Invalid."""
    limit = request.query_number("limit", 0)
    return LogQuery(
        follow=request.query_flag("follow"),
        limit=limit if limit > 0 else None,
        newest_first=request.first("orderBy") == "ORDER_BY_DESC",
        since=request.query_time("timestampAfter"),
        until=request.query_time("timestampBefore"),
        levels=tuple(level.removeprefix("LOG_LEVEL_") for level in request.query_all("levels")),
        rank_ids=tuple(whole(text, "rankIds") for text in request.query_all("rankIds")),
        search="" if request.query_flag("enableRegex") else request.first("searchText"),
        allocation_ids=tuple(request.query_all("allocationIds")),
    )


def _keeps(request: Request) -> Callable[[LogLine], bool] | None:
    """Return the filter for what a `LogQuery` cannot express; None if no such filter is asked for.

    These are agents, containers, sources, streams and regular expressions.
    """
    sources, streams = set(request.query_all("sources")), set(request.query_all("stdtypes"))
    agents, containers = set(request.query_all("agentIds")), set(request.query_all("containerIds"))
    text = request.first("searchText") if request.query_flag("enableRegex") else ""
    if not (sources or streams or agents or containers or text):
        return None
    pattern = _pattern(text)
    here = {agent.id for agent in request.master.machine.agents()}
    known: dict[str, str] = {}

    def container(line: LogLine) -> str:
        if not line.allocation_id:  # the master's own line
            return ""
        if line.allocation_id not in known:
            known[line.allocation_id] = request.master.tasks.allocation(line.allocation_id).container_id
        return known[line.allocation_id]

    def keep(line: LogLine) -> bool:
        return (
            (not sources or line.source in sources)
            and (not streams or line.stdtype in streams)
            and (not agents or bool(agents & here))
            and (not containers or container(line) in containers)
            and (not text or pattern.search(line.message) is not None)
        )

    return keep


def _pattern(text: str) -> Any:
    """Compile a client's regular expression. Raises Invalid for one that is wrong or too large.

    RE2 matches in a time that is linear in the line and holds no lock of the interpreter meanwhile;
    with ``re``, ``(a+)+$`` on one line would stop every thread of the master for good.
    """
    options = re2.Options()
    options.log_errors = False
    try:
        pattern = re2.compile(text, options)
    except re2.error as error:
        why = error.args[0] if error.args else ""
        why = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        raise Invalid(f"searchText is not a regular expression (RE2 syntax): {why}") from None
    if pattern.programsize > _LARGEST_PROGRAM:
        raise Invalid("searchText is too large a regular expression", fix="Use fewer and smaller repetitions.")
    return pattern


def _stream(
    request: Request, read: Callable[[LogQuery], Iterator[LogLine | None]], shape: Callable[[LogLine], Dict]
) -> Response | StreamingResponse:
    asked, keep = _query(request), _keeps(request)
    if keep is None:
        found = read(asked)
    else:
        # The limit counts lines that pass every filter.
        everything = (line for line in read(replace(asked, limit=None)) if line is None or keep(line))
        found = islice(everything, asked.limit) if asked.limit is not None else everything
    if not asked.follow:
        return lines((shape(line) for line in found if line is not None), follow=False)
    place = ExitStack()
    if not place.enter_context(request.waits.one()):
        return failure(503, "too many logs are being followed already, try again")
    return lines((None if line is None else shape(line) for line in found), follow=True, done=place.close)


def _shared(line: LogLine) -> Dict:
    """Render what the lines of trials and of tasks have in common.

    Clients print ``message`` as it is; ``log`` is the bare text.
    """
    text = strip_control(line.message)  # `det trial logs` prints it to a terminal
    rank = "" if line.rank is None or text.startswith("[rank=") else f"[rank={line.rank}] "
    return {
        "id": line.id,
        "timestamp": when(line.time),
        "message": f"[{when(line.time)}] {rank}{text}\n",
        "log": text,
        "level": f"LOG_LEVEL_{line.level if line.level in _LEVELS else 'INFO'}",
        "rankId": line.rank,
        "source": line.source,
        "stdtype": line.stdtype,
    }


def _trial_logs(request: Request) -> Response | StreamingResponse:
    number = request.numbers["trialId"]
    request.master.trials.get(number)
    return _stream(
        request,
        lambda asked: request.master.trials.logs(number, asked),
        lambda line: {**_shared(line), "trialId": line.trial_id},
    )


def _task_logs(request: Request) -> Response | StreamingResponse:
    name = request.args["taskId"]
    request.master.tasks.task(name)
    return _stream(
        request,
        lambda asked: request.master.tasks.logs(name, asked),
        lambda line: {**_shared(line), "taskId": line.task_id, "allocationId": line.allocation_id},
    )


def _master_logs(request: Request) -> Response | StreamingResponse:
    """Return entries of the master's log; a negative offset counts from the end. Following is left
    to ``zero-trial master logs``.
    """
    if request.query_flag("follow"):
        return failure(501, "the master's log is not followed over HTTP: run 'zero-trial master logs'")
    entries = list(_entries(request.master.machine.log_file))
    offset, limit = request.query_number("offset", 0), request.query_number("limit", 0)
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


ROUTES = (
    Route("GET", "/api/v1/trials/{trialId:int}/logs", _trial_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/tasks/{taskId}/logs", _task_logs, AuthLevel.BOTH),
    Route("GET", "/api/v1/master/logs", _master_logs),
)
