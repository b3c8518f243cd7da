"""What every request passes on its way to its route, over all routes: hosts, tokens, odd values."""

from __future__ import annotations

import copy
import http.client
import inspect
import json
import logging
import random
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.master.http.conftest import Ask, Prepared
from tests.master.world import CONFIG, OTHER_TASK_TOKEN, TASK_TOKEN, USER_TOKEN, UUID, World
from zero_trial.master.core.accounts import Principal
from zero_trial.master.http.app import Application, Router, all_routes, why_unsupported
from zero_trial.master.http.experiment_routes import CONTEXT_BODY
from zero_trial.master.http.messages import (
    AuthLevel,
    Request,
    RequestHead,
    Response,
    Route,
    StreamingResponse,
)
from zero_trial.master.http.server import HttpServer
from zero_trial.master.records import User
from zero_trial.master.store import database

ROUTES = list(all_routes())
ONES = ("experimentId", "trialId", "userId", "workspaceId", "projectId", "modelName", "modelVersionNum")
EXAMPLES = dict.fromkeys(ONES, "1") | {
    "uuid": UUID,
    "agentId": "laptop",
    "slotId": "0",
    "name": "determined",
    "label": "x",
}
EXAMPLES |= {"taskId": "task-1", "allocationId": "task-1.1", "resourcesId": "resources-1", "pool": "default"}
EXAMPLES |= {"externalExperimentId": "mine", "templateName": "small"}


def path_of(route: Route, **changes: str) -> str:
    examples = {**EXAMPLES, **changes}
    parts = route.path.split("/")
    return "/".join(examples[part[1:-1].partition(":")[0]] if part.startswith("{") else part for part in parts)


def test_only_the_version_and_a_login_are_answered_without_a_token() -> None:
    public = {f"{route.method} {route.path}" for route in ROUTES if route.level is AuthLevel.PUBLIC}
    assert public == {"GET /info", "GET /api/v1/master", "POST /api/v1/auth/login"}


CLOSED = [route for route in ROUTES if route.level is not AuthLevel.PUBLIC]


def test_an_allocations_token_in_the_users_header_permits_what_it_permits(ask: Ask) -> None:
    """That is how the SDK sends DET_USER_TOKEN from inside a trial."""
    asked = ("trials/1", "experiments/1", "me", "trials/2", "experiments/2", "experiments", "users")
    codes = [ask("GET", f"/api/v1/{path}", user=TASK_TOKEN)[0] for path in asked]
    assert codes == [200, 200, 200, 403, 403, 403, 403]
    assert ask("GET", "/api/v1/me", user=TASK_TOKEN)[1]["user"]["username"] == "determined"
    assert ask("POST", "/api/v1/auth/logout", user=TASK_TOKEN)[0] == 403
    assert ask("GET", "/api/v1/trials/1", user=TASK_TOKEN)[0] == 200


def test_an_allocations_token_is_good_for_its_own_things_only(ask: Ask, world: World) -> None:
    """Every part of every path that names an allocation, a task, a trial or an experiment is tried
    with the other allocation's, and every route of users."""
    others = {"experimentId": "2", "trialId": "2", "taskId": "task-2"}
    others |= {"allocationId": "task-2.1", "resourcesId": "resources-2"}
    tried, before = 0, world.content()
    for route in ROUTES:
        if route.level is AuthLevel.USER:
            assert ask(route.method, path_of(route), task=TASK_TOKEN)[0] in (401, 403), route
        if route.level not in (AuthLevel.TASK, AuthLevel.BOTH):
            continue
        for name, other in others.items():
            if f"{{{name}" in route.path:
                tried += 1
                status, answer = ask(route.method, path_of(route, **{name: other}), task=TASK_TOKEN, body={})
                assert status == 403, (route, name, answer)
    assert tried > 20
    assert world.content() == before


SAVED = {"uuid": UUID, "metadata": {"steps_completed": 1}, "resources": {}}
OWN_BODIES: list[tuple[str, str, Any]] = [
    ("POST", "/api/v1/runs/start", {"runId": 2}),
    ("POST", "/api/v1/checkpoints", {**SAVED, "allocationId": "task-2.1", "taskId": "task-1"}),
    ("POST", "/api/v1/checkpoints", {**SAVED, "allocationId": "task-1.1", "taskId": "task-2"}),
    ("POST", "/api/v1/checkpoints", SAVED),
    ("PATCH", "/api/v1/checkpoints", {"checkpoints": [{"uuid": UUID, "resources": {"resources": {}}}]}),
    ("POST", f"/api/v1/checkpoints/{UUID}/metadata", {"checkpoint": {"metadata": {"steps_completed": 9}}}),
    ("POST", "/task-logs", [{"task_id": "task-2", "log": "x"}]),
    ("GET", "/api/v1/trials/metrics/trial_metrics?trialIds=2", {}),
    ("GET", f"/api/v1/checkpoints/{UUID}", {}),
    ("GET", f"/checkpoints/{UUID}", {}),
]


def test_nor_may_it_name_what_is_not_its_own_in_a_body(ask: Ask, world: World) -> None:
    world.save(UUID, 2)
    before = world.content()
    for method, path, body in OWN_BODIES:
        assert ask(method, path, task=TASK_TOKEN, body=body)[0] == 403, (path, body)
    assert world.content() == before
    world.exit(2)
    assert ask("GET", "/api/v1/trials/2", task=OTHER_TASK_TOKEN)[0] == 401  # it is over
    # a part of a path that nothing compares stays closed
    route = Route("GET", "/api/v1/things/{thingId}", lambda call: Response(), AuthLevel.BOTH)
    app = Application(world, Router([route]), port=80, waits=1)
    for token, status in ((USER_TOKEN, 200), (TASK_TOKEN, 403)):
        headers = {"host": "localhost:80", "authorization": f"Bearer {token}"}
        head = RequestHead("GET", "/api/v1/things/7", "", headers, 0)
        assert app(head, lambda limit: b"").status == status


@contextmanager
def full_disk(world: World) -> Iterator[Callable[[], None]]:
    """Let the store grow no more; yield what lets it grow again."""

    def limit(pages: int) -> None:
        with world.state.database.transaction() as connection:
            connection.execute(f"PRAGMA max_page_count = {pages}")

    limit(1)
    yield lambda: limit(1 << 30)


LARGE = {"text": "x" * 100_000}


def test_a_full_disk_ends_no_trial(
    ask: Ask, task: Any, world: World, monkeypatch: pytest.MonkeyPatch, user: Any
) -> None:
    util = pytest.importorskip("determined.common.util")
    bindings = pytest.importorskip("determined.common.api.bindings")
    with full_disk(world) as free:
        body = {"name": "x" * 80, "description": LARGE["text"]}
        status, answer = ask("PATCH", "/api/v1/experiments/1", user=USER_TOKEN, body=body)
        assert status == 507 and "master's disk is full" in answer["message"] and "Free space" in answer["message"]
        assert ask("GET", "/api/v1/experiments/1", user=USER_TOKEN)[0] == 200
        plain = Application._unavailable
        answers: list[Response] = []

        def unavailable(*args: Any, **more: Any) -> Response:
            answers.append(plain(*args, **more))
            free()
            return replace(answers[-1], headers={"Retry-After": "0"})

        monkeypatch.setattr(Application, "_unavailable", unavailable)
        report = bindings.v1TrialMetrics(
            trialId=1, trialRunId=1, stepsCompleted=3, metrics=bindings.v1Metrics(avgMetrics={"loss": 0.5, **LARGE})
        )
        bindings.post_ReportTrialMetrics(
            task.with_retry(util.get_max_retries_config()),
            body=bindings.v1ReportTrialMetricsRequest(group="training", metrics=report),
            metrics_trialId=1,
        )
    assert [(each.status, each.headers) for each in answers] == [(503, {"Retry-After": "60"})]
    assert [each.metrics["loss"] for each in world.trials.metrics(1)] == [0.5]


def test_a_locked_store_is_named(ask: Ask, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.2)
    world.restart()
    with closing(sqlite3.connect(world.directory.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for name in "ab":
            status, answer = ask("PATCH", "/api/v1/experiments/1", user=USER_TOKEN, body={"name": name})
            assert status == 503 and "another program has locked" in answer["message"]
        assert ask("GET", "/api/v1/experiments/1", user=USER_TOKEN)[1]["experiment"]["name"] == "example"
    assert ask("PATCH", "/api/v1/experiments/1", user=USER_TOKEN, body={"name": "c"})[0] == 200


def test_this_host_and_its_own_origin_are_answered(ask: Ask, server: HttpServer) -> None:
    for headers in ({"Origin": server.url}, {"Host": f"LOCALHOST:{server.port}"}):
        assert ask("GET", "/info", headers=headers)[0] == 200


def test_an_unknown_route_is_404_for_users_and_is_logged(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        status, answer = ask("GET", "/api/v1/inventions/7", user=USER_TOKEN)
    known = "is not supported by the embedded master, which serves det, the SDK and trials"
    assert (status, answer["message"]) == (404, f"GET /api/v1/inventions/7 {known}")
    assert "no route for GET /api/v1/inventions/7" in caplog.text
    assert ask("GET", "/api/v1/inventions/7")[0] == 401


def test_a_fault_of_ours_is_500_with_a_trace_in_the_log_and_the_server_goes_on(
    ask: Ask, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.machine, "jobs", lambda: 1 / 0)
    status, answer = ask("GET", "/api/v1/job-queues-v2", user=USER_TOKEN)
    assert status == 500
    assert "ZeroDivisionError" in answer["message"]
    assert "Traceback" in caplog.text
    assert ask("GET", "/api/v1/me", user=USER_TOKEN)[0] == 200


@pytest.mark.parametrize(("method", "length"), [("POST", 0), ("PUT", 1 << 20)], ids=["logins", "large bodies"])
def test_few_logins_and_few_large_bodies_are_handled_at_once(world: World, method: str, length: int) -> None:
    """A password takes 16 MiB to check, a body of 5 MiB 400 MiB once it is parsed."""
    entered, leave, done = threading.Semaphore(0), threading.Event(), []

    def handle(call: Request) -> Response:
        entered.release()
        done.append(leave.wait(30))
        return Response()

    route = Route(method, "/", handle, AuthLevel.PUBLIC)
    app = Application(world, Router([route, Route("GET", "/", handle, AuthLevel.PUBLIC)]), port=1, waits=1)

    def send(method: str, length: int) -> threading.Thread:
        head = RequestHead(method, "/", "", {"host": "127.0.0.1:1"}, length)
        thread = threading.Thread(target=app, args=(head, lambda limit: b""))
        thread.start()
        return thread

    threads = [send(method, length) for _ in range(8)]
    assert all(entered.acquire(timeout=30) for _ in range(4))
    assert not entered.acquire(timeout=0.05) and not done
    threads.append(send("GET", 1000))
    assert entered.acquire(timeout=30)
    leave.set()
    for thread in threads:
        thread.join(timeout=30)
    assert done == [True] * 9


@pytest.mark.parametrize(
    ("path", "status"), [("/info", 200), ("/api/v1/trials/1/logs", 405), ("/api/v1/trials/9", 404), ("/nothing", 404)]
)
def test_head_is_answered_as_get_without_a_body(server: HttpServer, path: str, status: int) -> None:
    """The next request on the same connection is read right: no body of the first is in its way."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {USER_TOKEN}"}
    for _ in range(2):
        connection.request("HEAD", path, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")
    connection.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        lines = f"HEAD {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {USER_TOKEN}\r\nConnection: close\r\n\r\n"
        sock.sendall(lines.encode())
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 %d " % status) and received.endswith(b"\r\n\r\n")
    assert received.count(b"\r\n\r\n") == 1


def test_only_a_submission_may_be_large_and_only_a_login_is_read_from_anybody() -> None:
    large = {route.path for route in ROUTES if route.limit > 8 * 1024 * 1024}
    assert large == {"/api/v1/experiments", "/api/v1/experiments/by-external-id/{externalExperimentId}"}
    posts = [route for route in ROUTES if route.method == "POST"]
    assert {route.limit for route in posts if route.path == "/api/v1/experiments"} == {CONTEXT_BODY}
    assert all(route.limit <= 16 * 1024 for route in posts if route.level is AuthLevel.PUBLIC)


def test_every_route_is_one_that_determined_has() -> None:
    """Compared with the paths in the original bindings; the few that clients ask for without
    bindings are named here."""
    bindings = pytest.importorskip("determined.common.api.bindings")
    text = Path(bindings.__file__).read_text(encoding="utf-8")
    known = {
        (method, re.sub(r"\{.*?\}", "{}", path))
        for method, path in re.findall(r'method="(\w+)",\s+path=f?"(.*?)"', text)
    }
    got = ("/info", "/checkpoints/{}", "/experiments/{}/preview_gc")
    plain = {("POST", "/task-logs"), *(("GET", path) for path in got)}
    ours = {(route.method, re.sub(r"\{.*?\}", "{}", route.path)) for route in ROUTES}
    assert len(ours) == len(ROUTES)
    assert len(known) > 200
    assert ours - known - plain == set()


ROUTER = Router(
    [
        Route("GET", "/a", lambda call: Response()),
        Route("POST", "/a", lambda call: Response()),
        Route("GET", "/a/{number:int}", lambda call: Response()),
        Route("GET", "/a/{name}/b", lambda call: Response()),
        Route("GET", "/a/special", lambda call: Response()),
        Route("DELETE", "/a/{number:int}/b/{other}", lambda call: Response()),
    ]
)


FOUND = {
    "a": "/a",
    "a/special": "/a/special",
    "a/special/b": "/a/{name}/b",
    "a/7": "/a/{number:int}",
    "a/7/b": "/a/{name}/b",
}


def test_literal_parts_win_and_nothing_is_guessed() -> None:
    for path in (*FOUND, "a/", "a//b", "b", "", "a/7/b/c/d"):
        found = ROUTER.find("GET", path.split("/"))
        assert (found.route.path if found else None) == FOUND.get(path)
    assert ROUTER.find("POST", ["a"]) is not None and ROUTER.find("PUT", ["a"]) is None
    found = ROUTER.find("DELETE", ["a", "7", "b", "x y"])
    assert found is not None
    assert (dict(found.args), list(found.numbers)) == ({"number": "7", "other": "x y"}, ["number"])


def test_parts_of_determined_that_are_not_here_say_what_to_do(ask: Ask) -> None:
    for path, words in (
        ("/api/v1/notebooks", "run the program directly"),
        ("/api/v1/tensorboards/7/kill", "the live page shows the curves"),
        ("/api/v1/trials/7/retain_logs", "logs are kept"),
        ("/api/v1/workspaces/1/namespace-bindings", "no namespaces"),
    ):
        status, answer = ask("GET", path, user=USER_TOKEN)
        assert status == 501 and words in answer["message"], path
    for path in ("", "/", "/api", "/api/v1", "/api/v1/inventions", "/api/v1/notebooksx", "/metadata/x"):
        assert why_unsupported(path) is None


# -- whatever is asked, the master has an answer

TIME = "2023-11-14T22:13:30Z"
FILE = {"path": "a.py", "type": 48, "content": "cGFzcw==", "mtime": "1", "mode": 33188, "uid": 0, "gid": 0}
VALUES = {"avgMetrics": {"validation_loss": 0.5, "other": {"a": [1]}}, "batchMetrics": [{"loss": 1.0}]}
REPORT = {"trialId": 1, "trialRunId": 1, "stepsCompleted": 5, "reportTime": TIME, "metrics": VALUES}
CHECKPOINT = {"uuid": UUID.replace("6f", "7f"), "allocationId": "task-1.1", "taskId": "task-1", "reportTime": TIME}
CHECKPOINT |= {
    "metadata": {"steps_completed": 5},
    "resources": {"state.json": "11"},
    "state": "STATE_COMPLETED",
    "training": {},
}
WORDS_OF_MODEL = {"name": "gpt", "description": "d", "notes": "n", "metadata": {"a": 1}, "labels": ["a"]}
WORDS_OF_MODEL |= {"workspaceId": 1, "workspaceName": "Uncategorized"}
SUBMITTED = {
    "config": yaml.safe_dump(CONFIG),
    "modelDefinition": [FILE],
    "activate": True,
    "validateOnly": False,
    "parentId": 1,
}
OUTSIDE = {
    "config": "{name: n, searcher: {name: single, metric: loss}}",
    "unmanaged": True,
    "parentId": 0,
    "projectId": 1,
}
TRIAL = {"experimentId": 3, "hparams": {"lr": 0.1}, "unmanaged": True}
STORAGE = {"type": "shared_fs", "host_path": "/tmp"}
PLACE = {"agentUserGroup": None, "clusterNamespaceMeta": {}, "clusterQuotaPairs": {}}
POLICY = {"saveExperimentBest": 0, "saveTrialBest": 1, "saveTrialLatest": 1}
PATCH = {"name": "n", "description": "d", "labels": ["a"], "notes": "n", "checkpointStorage": POLICY}
JOB = {"jobId": "job-1", "priority": 3, "weight": 1.0, "aheadOf": "", "resourcePool": ""}
PERSON = {"username": "determined", "admin": True, "active": True, "displayName": "D", "remote": False}
ALLOCATION, EXPERIMENT, RUN = (
    "/api/v1/allocations/{allocationId}",
    "/api/v1/experiments/{experimentId:int}",
    "/api/v1/trials/{trialId:int}",
)
WORKSPACE, PROJECT, AGENT = (
    "/api/v1/workspaces/{workspaceId:int}",
    "/api/v1/projects/{projectId:int}",
    "/api/v1/agents/{agentId}",
)
BODIES: dict[str, Any] = {
    f"POST {ALLOCATION}/all_gather": {"requestUuid": "a", "numPeers": 1, "data": {"rank": 0}},
    "POST /api/v1/experiments": {**SUBMITTED, "projectId": 1, "template": "", "unmanaged": False},
    "PUT /api/v1/experiments/by-external-id/{externalExperimentId}": OUTSIDE,
    "POST /api/v1/trials": TRIAL,
    "PUT /api/v1/trials": {"createTrialRequest": TRIAL, "externalTrialId": "first"},
    f"POST {RUN}/start": {"trialId": 3, "resume": True},
    f"PATCH {RUN}": {"trialId": 3, "state": "STATE_RUNNING"},
    f"POST {EXPERIMENT}/move": {"destinationProjectId": 2, "experimentId": 1},
    "POST /api/v1/workspaces": {"name": "new", "checkpointStorageConfig": STORAGE, **PLACE},
    f"PATCH {WORKSPACE}": {"name": "other", "checkpointStorageConfig": STORAGE},
    f"POST {WORKSPACE}/projects": {"name": "new", "description": "d", "key": "NEW"},
    f"PATCH {PROJECT}": {"name": "other", "description": "d"},
    f"PUT {PROJECT}/notes": {"notes": [{"name": "n", "contents": "c"}]},
    "POST /api/v1/preview-hp-search": {"config": {"searcher": CONFIG["searcher"], "hyperparameters": {"lr": 0.1}}},
    "POST /api/v1/experiments/continue": {"id": 2, "overrideConfig": "hyperparameters: {lr: 1.0}"},
    f"PATCH {EXPERIMENT}": {**PATCH, "resources": {"maxSlots": 1, "weight": 1.5, "priority": 3}},
    f"POST {RUN}/metrics": {"group": "validation", "metrics": REPORT},
    f"POST {RUN}/progress": {"progress": 0.5, "is_raw": True, "isRaw": True},
    f"POST {RUN}/runner/metadata": {"state": "training"},
    f"POST {RUN}/early_exit": {"reason": "EXITED_REASON_INVALID_HP"},
    "POST /api/v1/runs/start": {"runId": 1, "checkpointStorage": {**STORAGE, "storage_path": "x"}},
    "POST /api/v1/runs/{trialId:int}/metadata": {"metadata": {"a": {"b": 1}}},
    "POST /api/v1/checkpoints": CHECKPOINT,
    "POST /api/v1/checkpoints/{uuid}/metadata": {"checkpoint": {"uuid": UUID, "metadata": {"a": {"b": 1}}}},
    "PATCH /api/v1/checkpoints": {"checkpoints": [{"uuid": UUID, "resources": {"resources": {"a": "1"}}}]},
    "DELETE /api/v1/checkpoints": {"checkpointUuids": [UUID]},
    "POST /api/v1/checkpoints/rm": {"checkpointUuids": [UUID], "checkpointGlobs": ["*.bin"]},
    f"POST {ALLOCATION}/acceleratorData": {"acceleratorData": {"acceleratorType": "cpu"}},
    "POST /task-logs": [{"task_id": "task-1", "log": "x", "timestamp": TIME, "rank": "0"}],
    "POST /api/v1/models": WORDS_OF_MODEL,
    "PATCH /api/v1/models/{modelName}": WORDS_OF_MODEL,
    "POST /api/v1/models/{modelName}/versions": {**WORDS_OF_MODEL, "checkpointUuid": UUID, "comment": "c"},
    "PATCH /api/v1/models/{modelName}/versions/{modelVersionNum:int}": {**WORDS_OF_MODEL, "comment": "c"},
    "POST /api/v1/templates/{templateName}": {"name": "small", "config": {"description": "d"}, "workspaceId": 0},
    "PATCH /api/v1/templates/{templateName}": {"description": "d"},
    **{f"POST {AGENT}{slot}/enable": {} for slot in ("", "/slots/{slotId:int}")},
    **{f"POST {AGENT}{slot}/disable": {"drain": True} for slot in ("", "/slots/{slotId:int}")},
    "POST /api/v1/job-queues": {"updates": [JOB]},
    "POST /api/v1/auth/login": {"username": "determined", "password": "x", "isHashed": False},
    "POST /api/v1/users": {"user": {**PERSON, "username": "new"}, "password": "x", "isHashed": True},
    "PATCH /api/v1/users/{userId:int}": {**PERSON, "password": "x", "isHashed": True, "agentUserGroup": None},
}
ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**31, 2**63, 10**400, -(10**400), float("nan"), float("inf")),
    *("", "x", "1", "NaN", "\ud800", "\0", "\x1b[2J", "a" * 70_000),
    *("9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "- [", "{a: &x [*x]}", "searcher: 7"),
    *([], {}, [[]], [{}], [None], {"": {}}, {"a": None}),
]
PARTS = ["2", "0", "-1", "x", "9" * 20, "%00", "%ED%A0%80", "a%2Fb", "task-1.1", UUID]
WORDS = [
    *("", "1", "-1", "-2", "x", "9" * 12, "NaN", "1e400", "%00", "%ED%A0%80", "true", "ORDER_BY_DESC", UUID),
    *("(", "(a%2B)%2B$", "a{9999}", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00%2B14:00"),
]


class Open(Application):
    """Takes every sender for an administrator."""

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
    read = re.findall(r'(?:first|query_\w+|passes\w*|_count\(request\.first)\(\s*"(\w+)"', source)
    return sorted({*read, "offset", "limit", "save_trial_best"} - {"timeout_seconds", "timeoutSeconds"})


def questions(route: Any, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Every part of the path, every field of the query and every place of the body with every odd
    value, one at a time."""
    path = path_of(route)
    body = BODIES.get(f"{route.method} {route.path}", {})
    good = json.dumps(body).encode()
    yield path, good
    for name in re.findall(r"\{[^}]*\}", route.path):
        for part in PARTS:
            yield path_of(route, **{name[1:-1].partition(":")[0]: part}), good
    for field in fields(route):
        for word in WORDS:
            yield f"{path}?{field}={word}&enableRegex={rng.choice(['true', 'false'])}", good
    for place in places(body):
        for value in ODD:
            yield path, json.dumps(changed(body, place, value)).encode()
    deep = (b"[" * 100_000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"a": 1' + b"0" * 5000 + b"}")
    for raw in (b"[", b'"x"', b"null", b"\xff\xfe", b'{"a": 1e999}', *deep):
        yield path, raw


def test_every_route_that_reads_a_body_has_an_example() -> None:
    reads = {
        f"{route.method} {route.path}"
        for route in ROUTES
        if "body()" in inspect.getsource(inspect.unwrap(route.action))
    }
    assert reads == set(BODIES)


def furnish(root: Path) -> World:
    """A world with one at least of all that is asked for."""
    world = World(root)
    world.save(UUID)
    world.report(1, "validation", 5, {"validation_loss": 0.5})
    world.write(1, "first", "aaaa")
    unmanaged = world.add_unmanaged("mine")
    world.unmanaged.create(unmanaged, {}, "first")
    owner = world.accounts.users()[0]
    for name in ("mine", "yours"):
        world.workspaces.create_project(world.workspaces.create(name, owner, None).id, name, owner, "", None)
    return world


ASKED = 40  # requests to each route, of some hundred


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_every_request_gets_an_answer(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes no sense is refused with a 4xx; no request makes a 500, and none makes a later GET
    answer 500."""
    monkeypatch.setattr("zero_trial.master.core.accounts._COST", 2)
    prepared = Prepared(furnish(tmp_path / "root"))
    app = Open(prepared.world, Router(ROUTES), port=1, waits=1)

    def check(route: Route, target: str, content: bytes) -> None:
        if "preemption" in target:  # does not wait
            target += "&timeout_seconds=0" if "?" in target else "?timeout_seconds=0"
        path, _, query = target.partition("?")
        head = RequestHead(route.method, path, query, {"host": "127.0.0.1:1"}, len(content))
        answer = app(head, lambda limit: content)
        if isinstance(answer, StreamingResponse):
            if "follow=" not in target:
                list(islice(answer.pieces, 3))
            answer.close()
        assert answer.status < 500 or answer.status == 501, (route, target, content[:300])

    for route in ROUTES:
        if route.method == method:
            prepared.again()
            rng = random.Random(f"{method} {route.path}")
            asked = list(questions(route, rng))
            for target, content in rng.sample(asked, min(ASKED, len(asked))):
                check(route, target, content)
            for other in ROUTES:
                if other.method == "GET" != method:
                    check(other, path_of(other), b"")
    prepared.world.close()
