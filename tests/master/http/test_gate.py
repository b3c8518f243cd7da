"""AuthLevel gets in: hosts, origins, tokens, and what each token is good for, over every route that there is."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import OTHER_TASK_TOKEN, TASK_TOKEN, USER_TOKEN, UUID, World
from zero_trial.master.http import Server
from zero_trial.master.http.app import Application, all_routes
from zero_trial.master.http.request import Request, RequestHead, parse_head
from zero_trial.master.http.response import Response
from zero_trial.master.http.router import AuthLevel, Route, Router

ROUTES = list(all_routes())
EXAMPLES = {
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


def path_of(route: Route, **changes: str) -> str:
    parts = [part[1:-1].partition(":")[0] if part.startswith("{") else None for part in route.path.split("/")]
    return "/".join(
        part if name is None else changes.get(name, EXAMPLES[name])
        for name, part in zip(parts, route.path.split("/"), strict=True)
    )


def names(routes: list[Route]) -> list[str]:
    return [f"{route.method} {route.path}" for route in routes]


def test_only_the_version_and_a_login_are_answered_without_a_token() -> None:
    assert names([route for route in ROUTES if route.level is AuthLevel.ANYBODY]) == [
        "GET /info",
        "GET /api/v1/master",
        "POST /api/v1/auth/login",
    ]


CLOSED = [route for route in ROUTES if route.level is not AuthLevel.ANYBODY]


def test_without_a_good_token_no_other_route_answers(ask: Ask, world: World) -> None:
    before = world.content()
    for route in CLOSED:
        path = path_of(route)
        assert ask(route.method, path)[0] == 401, route
        assert ask(route.method, path, user="wrong", task="wrong")[0] == 401, route
    assert world.content() == before


def test_a_users_token_in_the_tasks_header_and_the_other_way_round_is_none(ask: Ask) -> None:
    assert ask("GET", "/api/v1/experiments", task=USER_TOKEN)[0] == 401
    assert ask("GET", "/api/v1/trials/1", user=TASK_TOKEN)[0] == 401


def test_an_allocations_token_is_not_good_for_what_users_do(ask: Ask, world: World) -> None:
    before = world.content()
    for route in ROUTES:
        if route.level is AuthLevel.USER:
            status, answer = ask(route.method, path_of(route), task=TASK_TOKEN)
            assert status in (401, 403), (route, answer)
    assert world.content() == before


def test_an_allocations_token_is_good_for_its_own_things_only(ask: Ask, world: World) -> None:
    """Every part of every path that names an allocation, a task, a trial or an experiment is tried with the other allocation's."""
    others = {
        "experimentId": "2",
        "trialId": "2",
        "taskId": "task-2",
        "allocationId": "task-2.1",
        "resourcesId": "resources-2",
    }
    tried, before = 0, world.content()
    for route in ROUTES:
        if route.level not in (AuthLevel.TASK, AuthLevel.BOTH):
            continue
        for name, other in others.items():
            if f"{{{name}" in route.path:
                tried += 1
                status, answer = ask(route.method, path_of(route, **{name: other}), task=TASK_TOKEN, body={})
                assert status == 403, (route, name, answer)
    assert tried > 20
    assert world.content() == before


OWN_BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/api/v1/runs/start", {"runId": 2}),
    (
        "POST",
        "/api/v1/checkpoints",
        {
            "uuid": UUID,
            "metadata": {"steps_completed": 1},
            "resources": {},
            "allocationId": "task-2.1",
            "taskId": "task-1",
            "training": {},
        },
    ),
    (
        "POST",
        "/api/v1/checkpoints",
        {
            "uuid": UUID,
            "metadata": {"steps_completed": 1},
            "resources": {},
            "allocationId": "task-1.1",
            "taskId": "task-2",
            "training": {},
        },
    ),
    ("POST", "/api/v1/checkpoints", {"uuid": UUID, "metadata": {"steps_completed": 1}, "resources": {}}),
    ("PATCH", "/api/v1/checkpoints", {"checkpoints": [{"uuid": UUID, "resources": {"resources": {}}}]}),
    ("POST", "/api/v1/task/logs", {"logs": [{"taskId": "task-2", "log": "x"}]}),
    ("GET", "/api/v1/trials/metrics/trial_metrics?trialIds=2", {}),
    ("GET", f"/api/v1/checkpoints/{UUID}", {}),
    ("GET", f"/checkpoints/{UUID}", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), OWN_BODIES)
def test_nor_may_it_name_what_is_not_its_own_in_a_body(
    ask: Ask, world: World, method: str, path: str, body: dict[str, Any]
) -> None:
    world.save(UUID, 2)
    before = world.content()
    assert ask(method, path, task=TASK_TOKEN, body=body)[0] == 403
    assert world.content() == before


def test_a_metric_report_for_another_trial_than_the_paths_is_refused(ask: Ask, world: World) -> None:
    report = {"trialId": 2, "trialRunId": 1, "stepsCompleted": 1, "metrics": {"avgMetrics": {"loss": 1.0}}}
    assert (
        ask("POST", "/api/v1/trials/1/metrics", task=TASK_TOKEN, body={"group": "training", "metrics": report})[0]
        == 400
    )
    assert world.trials.metrics(1) == []


def test_the_token_of_an_allocation_that_is_over_is_none(ask: Ask, world: World) -> None:
    world.exit(2)
    assert ask("GET", "/api/v1/trials/2", task=OTHER_TASK_TOKEN)[0] == 401


def test_a_user_who_was_switched_off_is_nobody(ask: Ask, world: World) -> None:
    world.accounts.put_user(replace(world.accounts.users()[0], active=False))
    assert ask("GET", "/api/v1/me", user=USER_TOKEN)[0] == 401


@pytest.mark.parametrize(
    "host",
    ["example.com", "127.0.0.1", "127.0.0.1:1", "localhost", "", "127.0.0.1.example.com:{port}", "example.com:{port}"],
)
def test_another_host_is_not_answered(ask: Ask, server: Server, host: str) -> None:
    """A page that points its own name at this machine (DNS rebinding) still sends its own name."""
    status, _ = ask("GET", "/info", user=USER_TOKEN, headers={"Host": host.format(port=server.port)})
    assert status == 403


def test_a_request_without_a_host_is_not_answered(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(b"GET /info HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 403 ")


def test_localhost_is_this_host_too(ask: Ask, server: Server) -> None:
    assert ask("GET", "/info", headers={"Host": f"LOCALHOST:{server.port}"})[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://example.com", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://127.0.0.1"]
)
def test_another_origin_is_not_answered(ask: Ask, server: Server, origin: str, world: World) -> None:
    before = world.content()
    headers = {"Origin": origin.format(port=server.port)}
    assert ask("GET", "/info", headers=headers)[0] == 403
    assert ask("POST", "/api/v1/experiments/1/kill", user=USER_TOKEN, headers=headers)[0] == 403
    assert world.content() == before


def test_the_same_origin_is_answered_and_a_cross_site_fetch_is_not(ask: Ask, server: Server) -> None:
    assert ask("GET", "/info", headers={"Origin": server.url})[0] == 200
    assert ask("GET", "/info", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403


@pytest.mark.parametrize(
    "number",
    [
        "1'%20OR%20'1'='1",
        "1;DROP%20TABLE%20experiments",
        "0x1",
        "1_0",
        "%C2%B2",
        "1e3",
        "99999999999999999999",
        "-",
        "+1",
        "%201",
    ],
)
def test_what_is_no_number_never_reaches_a_verb(ask: Ask, world: World, number: str) -> None:
    before = world.content()
    assert ask("GET", f"/api/v1/experiments/{number}", user=USER_TOKEN)[0] == 400
    assert ask("POST", f"/api/v1/experiments/{number}/kill", user=USER_TOKEN)[0] == 400
    assert world.content() == before


def test_an_unknown_route_is_404_for_those_who_may_ask_and_is_written_down(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        status, answer = ask("GET", "/api/v1/inventions/7", user=USER_TOKEN)
    assert (status, answer["message"]) == (404, "GET /api/v1/inventions/7 is not known to the embedded master")
    assert "no route for GET /api/v1/inventions/7" in caplog.text
    assert ask("GET", "/api/v1/inventions/7")[0] == 401


def test_what_is_known_and_not_supported_says_what_to_do(ask: Ask) -> None:
    status, answer = ask("GET", "/api/v1/notebooks", user=USER_TOKEN)
    assert status == 501
    assert "run the program itself" in answer["message"]


def test_a_fault_of_ours_is_500_with_a_trace_in_the_log_and_the_server_goes_on(
    ask: Ask, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.machine, "jobs", lambda: 1 / 0)
    status, answer = ask("GET", "/api/v1/job-queues", user=USER_TOKEN)
    assert status == 500
    assert "ZeroDivisionError" in answer["message"]
    assert "Traceback" in caplog.text
    assert ask("GET", "/api/v1/me", user=USER_TOKEN)[0] == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_400(server: Server, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        head = f"PATCH /api/v1/experiments/1 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {USER_TOKEN}\r\n"
        sock.sendall(head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("token", [USER_TOKEN, None])
def test_a_gigabyte_is_refused_before_it_is_read(server: Server, token: str | None) -> None:
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        head = f"POST /api/v1/experiments HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{authorization}Content-Length: 1073741824\r\n\r\n"
        sock.sendall(head.encode())
        text = sock.recv(4096)
    assert text.startswith(b"HTTP/1.1 413 " if token else b"HTTP/1.1 401 ")
    assert json.loads(text.partition(b"\r\n\r\n")[2])["message"]


def test_a_gigabyte_in_chunks_is_refused_when_it_passes_the_limit(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        head = f"PATCH /api/v1/experiments/1 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {USER_TOKEN}\r\n"
        sock.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        for _ in range(8):
            sock.sendall(chunk)
        sock.sendall(b"40000000\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_few_logins_are_checked_at_once(world: World) -> None:
    entered, leave, peak = threading.Semaphore(0), threading.Event(), []

    def check(call: Request) -> Response:
        entered.release()
        peak.append(leave.wait(30))
        return Response()

    gate = Application(world, Router([Route("POST", "/login", check, AuthLevel.ANYBODY)]), port=1, waits=1)
    head = parse_head(b"POST /login HTTP/1.1\r\nHost: 127.0.0.1:1")
    threads = [threading.Thread(target=gate, args=(head, lambda limit: b"")) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert all(entered.acquire(timeout=30) for _ in range(4))
    assert not entered.acquire(timeout=0.05) and not peak
    leave.set()
    for thread in threads:
        thread.join(timeout=30)
    assert peak == [True] * 8


def test_a_part_of_a_path_that_nothing_compares_is_closed_to_allocations(world: World) -> None:
    route = Route("GET", "/api/v1/things/{thingId}", lambda call: Response(), AuthLevel.BOTH)
    gate = Application(world, Router([route]), port=80, waits=1)

    def status(**headers: str) -> int:
        head = RequestHead(
            "GET", "/api/v1/things/7", "", {"host": "localhost:80", **headers}, keep_alive=True, length=0
        )
        return gate(head, lambda limit: b"").status

    assert status(authorization=f"Bearer {USER_TOKEN}") == 200
    assert status(**{"grpc-metadata-x-allocation-token": f"Bearer {TASK_TOKEN}"}) == 403


@pytest.mark.parametrize(
    ("path", "status"), [("/info", 200), ("/api/v1/trials/1/logs", 200), ("/api/v1/trials/9", 404), ("/nothing", 404)]
)
def test_head_is_answered_as_get_without_a_body(server: Server, path: str, status: int) -> None:
    """The next request on the same connection is read right: no body of the first is in its way."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    headers = {"Authorization": f"Bearer {USER_TOKEN}"}
    for _ in range(2):
        connection.request("HEAD", path, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")
    connection.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        lines = f"HEAD {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {USER_TOKEN}\r\nConnection: close\r\n\r\n"
        sock.sendall(lines.encode())
        received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 %d " % status) and received.endswith(b"\r\n\r\n")
    assert received.count(b"\r\n\r\n") == 1
