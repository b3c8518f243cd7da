"""All routes together."""

from __future__ import annotations

import copy
import inspect
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.master.world import CONFIG, UUID, World
from zero_trial.master.auth import Principal
from zero_trial.master.http.app import Application, all_routes
from zero_trial.master.http.request import BadRequest, RequestHead, parse_head
from zero_trial.master.http.response import StreamingResponse
from zero_trial.master.http.router import AuthLevel, Router
from zero_trial.master.http.routes.experiments import CONTEXT_BODY
from zero_trial.master.records import User


def test_no_two_routes_answer_the_same() -> None:
    Router(all_routes())


def test_only_a_submission_may_be_large_and_only_a_login_is_read_from_anybody() -> None:
    large = {route.path for route in all_routes() if route.limit > 8 * 1024 * 1024}
    assert large == {"/api/v1/experiments"}
    assert {
        route.limit for route in all_routes() if route.path == "/api/v1/experiments" and route.method == "POST"
    } == {CONTEXT_BODY}
    assert all(
        route.limit <= 16 * 1024
        for route in all_routes()
        if route.level is AuthLevel.ANYBODY and route.method == "POST"
    )


def test_every_route_is_one_that_determined_has() -> None:
    """Compared with the paths in the genuine bindings; the few that clients ask for without bindings are named here."""
    bindings = pytest.importorskip("determined.common.api.bindings")
    text = Path(bindings.__file__).read_text(encoding="utf-8")
    known = {
        (method, re.sub(r"\{.*?\}", "{}", path))
        for method, path in re.findall(r'method="(\w+)",\s+path=f?"(.*?)"', text)
    }
    plain = {("GET", "/info"), ("GET", "/checkpoints/{}"), ("GET", "/experiments/{}/preview_gc")}
    ours = {(route.method, re.sub(r"\{.*?\}", "{}", route.path)) for route in all_routes()}
    assert len(known) > 200
    assert ours - known - plain == set()


# -- whatever is asked, the master has an answer

FILE = {"path": "a.py", "type": 48, "content": "cGFzcw==", "mtime": "1", "mode": 33188, "uid": 0, "gid": 0}
REPORT = {
    "group": "validation",
    "metrics": {
        "trialId": 1,
        "trialRunId": 1,
        "stepsCompleted": 5,
        "reportTime": "2023-11-14T22:13:30Z",
        "metrics": {"avgMetrics": {"validation_loss": 0.5, "other": {"a": [1]}}, "batchMetrics": [{"loss": 1.0}]},
    },
}
CHECKPOINT = {
    "uuid": UUID.replace("6f", "7f"),
    "allocationId": "task-1.1",
    "taskId": "task-1",
    "metadata": {"steps_completed": 5},
    "resources": {"state.json": "11"},
    "reportTime": "2023-11-14T22:13:30Z",
    "state": "STATE_COMPLETED",
    "training": {},
}
BODIES: dict[str, dict[str, Any]] = {
    "POST /api/v1/experiments": {
        "config": yaml.safe_dump(CONFIG),
        "modelDefinition": [FILE],
        "activate": True,
        "validateOnly": False,
        "parentId": 1,
        "projectId": 1,
        "template": "",
        "unmanaged": False,
    },
    "POST /api/v1/experiments/continue": {"id": 2, "overrideConfig": "hyperparameters: {lr: 1.0}"},
    "PATCH /api/v1/experiments/{experimentId:int}": {
        "name": "n",
        "description": "d",
        "labels": ["a"],
        "notes": "n",
        "resources": {"maxSlots": 1, "weight": 1.5, "priority": 3},
        "checkpointStorage": {"saveExperimentBest": 0, "saveTrialBest": 1, "saveTrialLatest": 1},
    },
    "POST /api/v1/trials/{trialId:int}/metrics": REPORT,
    "POST /api/v1/trials/{trialId:int}/progress": {"progress": 0.5, "is_raw": True, "isRaw": True},
    "POST /api/v1/trials/{trialId:int}/runner/metadata": {"state": "training"},
    "POST /api/v1/trials/{trialId:int}/early_exit": {"reason": "EXITED_REASON_INVALID_HP"},
    "POST /api/v1/runs/start": {"runId": 1},
    "POST /api/v1/runs/{trialId:int}/metadata": {"metadata": {"a": {"b": 1}}},
    "POST /api/v1/checkpoints": CHECKPOINT,
    "PATCH /api/v1/checkpoints": {"checkpoints": [{"uuid": UUID, "resources": {"resources": {"a": "1"}}}]},
    "DELETE /api/v1/checkpoints": {"checkpointUuids": [UUID]},
    "POST /api/v1/checkpoints/rm": {"checkpointUuids": [UUID], "checkpointGlobs": ["*.bin"]},
    "POST /api/v1/allocations/{allocationId}/acceleratorData": {"acceleratorData": {"acceleratorType": "cpu"}},
    "POST /api/v1/task/logs": {
        "logs": [
            {
                "taskId": "task-1",
                "task_id": "task-1",
                "log": "x",
                "timestamp": "2023-11-14T22:13:30Z",
                "level": "LOG_LEVEL_INFO",
                "rankId": 0,
                "stdtype": "stdout",
            }
        ]
    },
    "POST /api/v1/job-queues": {
        "updates": [{"jobId": "job-1", "priority": 3, "weight": 1.0, "aheadOf": "", "resourcePool": ""}]
    },
    "POST /api/v1/auth/login": {"username": "determined", "password": "x", "isHashed": False},
    "POST /api/v1/users": {
        "user": {"username": "new", "admin": False, "active": True, "displayName": "New", "remote": False},
        "password": "x",
        "isHashed": True,
    },
    "PATCH /api/v1/users/{userId:int}": {
        "username": "determined",
        "admin": True,
        "active": True,
        "displayName": "D",
        "password": "x",
        "isHashed": True,
        "remote": False,
        "agentUserGroup": None,
    },
}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**70, 10**400, -(10**400), float("nan"), float("inf"), 1e308),
    *(
        "",
        "x",
        "1",
        "NaN",
        "\ud800",
        "\0",
        "\x1b[2J",
        "9999-12-31T23:59:59-12:00",
        "0001-01-01T00:00:00+14:00",
        "a" * 70_000,
    ),
    *(
        "- [",
        "{a: &x [*x]}",
        "!!python/object:x {}",
        "searcher: 7",
        [],
        {},
        [[]],
        [{}],
        [None],
        [1.5],
        {"": {}},
        {"a": None},
    ),
]
PARTS = [
    "1",
    "2",
    "0",
    "-1",
    "x",
    "9" * 20,
    "%00",
    "%ED%A0%80",
    "a%2Fb",
    "%1b[2J",
    "task-1",
    "task-1.1",
    UUID,
    "laptop",
]
WORDS = [
    *(
        "",
        "1",
        "-1",
        "-2",
        "x",
        "9" * 12,
        "NaN",
        "1e400",
        "%00",
        "%ED%A0%80",
        "true",
        "ORDER_BY_DESC",
        "(",
        "(a%2B)%2B$",
        "a{9999}",
    ),
    *(
        "9999-12-31T23:59:59-12:00",
        "0001-01-01T00:00:00%2B14:00",
        "2023-11-14T22:13:30Z",
        "SORT_BY_SEARCHER_METRIC",
        UUID,
    ),
]
GOOD = {
    "experimentId": "1",
    "trialId": "1",
    "taskId": "task-1",
    "allocationId": "task-1.1",
    "resourcesId": "resources-1",
    "agentId": "laptop",
    "slotId": "0",
    "userId": "1",
    "name": "determined",
    "label": "x",
    "pool": "default",
    "uuid": UUID,
    "workspaceId": "1",
    "projectId": "1",
}


class Open(Application):
    """Lets everybody in as an administrator."""

    def _principal(self, head: Any, found: Any) -> Principal:
        return Principal(user=User(1, "determined", admin=True, active=True, password=""))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of a JSON value, from the outside in."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    made = copy.copy(value)
    made[path[0]] = changed(value[path[0]], path[1:], new)
    return made


def fields(route: Any) -> list[str]:
    """The query fields that the route's module reads."""
    source = inspect.getsource(inspect.getmodule(route.action))  # type: ignore[arg-type]
    read = re.findall(r'(?:first|query_\w+|_count\(request\.first)\(\s*"(\w+)"', source)
    return sorted({*read, "offset", "limit", "save_trial_best"} - {"timeout_seconds", "timeoutSeconds"})


def questions(route: Any, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Every part of the path, every field of the query and every place of the body with every odd value, one at a time; then at random."""
    path = re.sub(r"\{(\w+)[^}]*\}", lambda name: GOOD[name[1]], route.path)
    body = BODIES.get(f"{route.method} {route.path}", {})
    good = json.dumps(body).encode()
    yield path, good
    for name in re.findall(r"\{[^}]*\}", route.path):
        for part in PARTS:
            odd = route.path.replace(name, part)
            yield re.sub(r"\{(\w+)[^}]*\}", lambda name: GOOD[name[1]], odd), good
    for field in fields(route):
        for word in WORDS:
            yield f"{path}?{field}={word}&enableRegex={rng.choice(['true', 'false'])}", good
    for place in places(body):
        for value in ODD:
            yield path, json.dumps(changed(body, place, value)).encode()
    for raw in (
        b"[",
        b'"x"',
        b"null",
        b"[" * 100_000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b"\xff\xfe",
        b'{"a": 1e999}',
    ):
        yield path, raw
    spots = list(places(body))
    for _ in range(100):
        odd = body
        for place in rng.sample(spots, min(len(spots), 2)):
            try:
                odd = changed(odd, place, rng.choice(ODD))
            except (KeyError, IndexError, TypeError):  # the other change has removed the place
                continue
        query = "&".join(f"{field}={rng.choice(WORDS)}" for field in rng.sample(fields(route), 2) if field != "follow")
        yield f"{path}?{query}", json.dumps(odd).encode()


def test_every_route_that_reads_a_body_has_an_example() -> None:
    reads = {
        f"{route.method} {route.path}"
        for route in all_routes()
        if "body()" in inspect.getsource(inspect.unwrap(route.action))
    }
    assert reads == set(BODIES)


@pytest.mark.parametrize("most", [150, pytest.param(10**6, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("route", list(all_routes()), ids=lambda route: f"{route.method} {route.path}")
def test_whatever_is_asked_the_master_has_an_answer(
    route: Any, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes no sense is refused with a 4xx; no request makes a 500, and none makes a later GET answer 500."""
    monkeypatch.setattr("zero_trial.master.auth._COST", 2)
    world = World(tmp_path / "root")
    world.save(UUID)
    world.report(1, "validation", 5, {"validation_loss": 0.5})
    world.write(1, "first", "aaaa")
    gate = Open(world, Router(all_routes()), port=1, waits=1)

    def status(method: str, target: str, content: bytes) -> int:
        try:
            if "preemption" in target:  # does not wait
                target += "&timeout_seconds=0" if "?" in target else "?timeout_seconds=0"
            head: RequestHead = parse_head(f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:1".encode())
        except BadRequest as error:
            return error.status
        answer = gate(head, lambda limit: content)
        if isinstance(answer, StreamingResponse):
            if "follow=" not in target:
                list(islice(answer.pieces, 3))
            answer.close()
        return answer.status

    rng = random.Random(f"{route.method} {route.path}")
    asked = list(questions(route, rng))
    for target, content in rng.sample(asked, min(most, len(asked))):
        found = status(route.method, target, content)
        assert found < 500 or found == 501, (target, content[:300])
    if route.method != "GET":
        for other in all_routes():
            if other.method == "GET" and "preemption" not in other.path:
                path = re.sub(r"\{(\w+)[^}]*\}", lambda name: GOOD[name[1]], other.path)
                found = status("GET", path, b"")
                assert found < 500 or found == 501, (path, "after", route.path)
    world.close()
