"""What another account of this machine may send to a master and its board: some 410 different
requests, none of which is answered with anything of the master's, changes anything, or ends it."""

from __future__ import annotations

import base64
import json
import re
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.master.http.test_app import CLOSED, path_of
from tests.master.world import OTHER_TASK_TOKEN, TASK_TOKEN, USER_TOKEN, UUID, World
from zero_trial.master.core.accounts import digest
from zero_trial.master.http import listen
from zero_trial.master.http.server import HttpServer
from zero_trial.master.store import user_rows
from zero_trial.report.board import board_routes
from zero_trial.report.master_reader import StoreSource

GUIDE = Path(__file__).parents[3] / "docs/guide/embedded_master.md"
NEIGHBOR_TOKEN, EXPIRED_TOKEN, OFF_TOKEN = "neighbor-token", "expired-token", "off-token"
# What a refusal must not hold: the master's values, its credentials, and files of this machine.
SECRETS = (b"validation_loss", b"context of", b"said by trial", USER_TOKEN.encode(), b"root:", b"SQLite", b"Traceback")
HOST = "127.0.0.1:{port}"


@dataclass(frozen=True)
class Hostile:
    """A request as it goes over the wire, with {port} in place of the server's, and how it is
    refused."""

    sent: bytes
    status: tuple[int, ...]


def raw(
    method: str,
    target: str,
    *headers: str,
    host: str | None = HOST,
    token: str = "",
    body: bytes = b"",
    length: str = "",
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Connection: close"]
    lines += [f"Host: {host}"] if host is not None else []
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += [f"Content-Length: {length or len(body)}"] if body or length else []
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


def json_body(value: Any) -> bytes:
    return json.dumps(value).encode()


VALUES = ("/api/v1/experiments", "/api/v1/master/logs", "/board/live?once=1&view=experiment&name=1")
PASSWORD = base64.b64encode(b"determined:").decode()

NO_TOKEN = [Hostile(raw(route.method, path_of(route)), (401,)) for route in CLOSED]

WRONG_TOKEN = [
    Hostile(raw("GET", path, header), (401,))
    for path in VALUES
    for header in (
        "Authorization:",
        "Authorization: Bearer",
        "Authorization: Bearer wrong",
        f"Authorization: Bearer {USER_TOKEN[:-1]}",
        f"Authorization: Bearer {USER_TOKEN}x",
        f"Authorization: Bearer {USER_TOKEN.upper()}",
        f"Authorization: Bearer {digest(USER_TOKEN)}",
        f"Authorization: Bearer {USER_TOKEN},{USER_TOKEN}",
        "Authorization: Bearer ' OR '1'='1",
        "Authorization: Bearer null",
        f"Authorization: Bearer {'a' * 8000}",
        f"Authorization: Bearer {EXPIRED_TOKEN}",
        f"Authorization: Bearer {OFF_TOKEN}",
        f"Authorization: {USER_TOKEN}",
        f"Authorization: Token {USER_TOKEN}",
        f"Authorization: Basic {PASSWORD}",
        f"Proxy-Authorization: Bearer {USER_TOKEN}",
        f"X-Auth-Token: {USER_TOKEN}",
        f"Cookie: auth={USER_TOKEN}; token={USER_TOKEN}",
        f"Grpc-Metadata-x-allocation-token: Bearer {USER_TOKEN}",
        f"Sec-WebSocket-Protocol: Bearer, {USER_TOKEN}",
    )
] + [
    Hostile(raw("GET", f"/board/live?once=1&{field}={USER_TOKEN}"), (401,))
    for field in ("token", "access_token", "auth", "Authorization")
]

OTHER_HOST = [
    Hostile(raw("GET", path, host=host, token=USER_TOKEN), (403,))
    for path in ("/api/v1/experiments", "/board")
    for host in (
        None,
        "",
        "example.com",
        "example.com:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost",
        "localhost.:{port}",
        "127.0.0.1.:{port}",
        "127.1:{port}",
        "127.0.0.2:{port}",
        "0.0.0.0:{port}",
        "2130706433:{port}",
        "0x7f.1:{port}",
        "[::1]:{port}",
        "[::ffff:127.0.0.1]:{port}",
        "127.0.0.1:{port}.example.com",
        "127.0.0.1.nip.io:{port}",
        "localhost:{port}@example.com",
        "127.0.0.1:{port}, example.com",
    )
]

OTHER_PAGE = [
    Hostile(raw(method, path, header, token=USER_TOKEN), (403,))
    for method, path in (("GET", "/board/live?once=1"), ("POST", "/api/v1/experiments/1/kill"))
    for header in (
        "Origin:",
        "Origin: null",
        "Origin: http://example.com",
        "Origin: https://127.0.0.1:{port}",
        "Origin: http://127.0.0.1",
        "Origin: http://127.0.0.1:1",
        "Origin: http://127.0.0.1:{port}.example.com",
        "Origin: http://example.com/127.0.0.1:{port}",
        "Origin: http://user@127.0.0.1:{port}",
        "Origin: moz-extension://abc",
        "Origin: chrome-extension://abc",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
    )
]

THROUGH = [
    Hostile(raw("GET", path, *more), (400, 401))
    for path, more in (
        ("http://169.254.169.254/latest/meta-data", ()),
        ("http://127.0.0.1:{port}/api/v1/experiments", ()),
        ("/proxy/task-1:8080/", ()),
        ("/api/v1/experiments", ("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1")),
        ("/api/v1/experiments", ("Forwarded: for=127.0.0.1;host=localhost",)),
        ("/api/v1/experiments", ("X-Forwarded-User: determined", "X-Remote-User: determined")),
        ("/info/../api/v1/experiments", ()),
        ("/info/%2e%2e/api/v1/experiments", ()),
        ("/info;/api/v1/experiments", ()),
        ("//api/v1/experiments", ()),
        ("/API/V1/experiments", ()),
        ("/api/v1/experiments/", ()),
        ("/api/v1/experiments#/info", ()),
        ("/api/v1/experiments?/info", ()),
    )
] + [
    Hostile(raw("CONNECT", "example.com:443"), (400,)),
    Hostile(raw("GET", "/api/v1/me", "Upgrade: websocket", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13"), (401,)),
    Hostile(raw("GET", "/board/live", "Upgrade: websocket", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13"), (401,)),
    Hostile(raw("GET", "/board/live", "Accept: text/event-stream", "Last-Event-ID: 1"), (401,)),
    Hostile(raw("GET", "/api/v1/trials/1/logs?follow=true"), (401,)),
    Hostile(raw("GET", "/api/v1/me", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"), (401,)),
    Hostile(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    Hostile(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
    *(
        Hostile(raw(method, "/info", *more), (401,))
        for method in ("OPTIONS", "TRACE", "PUT", "DELETE", "PROPFIND", "POST")
        for more in ((), ("X-HTTP-Method-Override: GET", "Access-Control-Request-Method: POST"))
    ),
]  # fmt: skip

LEADING_OUT = [
    Hostile(raw("GET", path, token=USER_TOKEN), (400, 404, 501))
    for path in (
        "/../../../../etc/passwd",
        "/board/../../../etc/passwd",
        "/board/..%2f..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%5c..%5cetc%5cpasswd",
        "/master.db",
        "/user.json",
        "/board/%00",
        "/checkpoints/..%2f..%2fmaster.db",
        "/checkpoints/%2fetc%2fpasswd",
        f"/checkpoints/{UUID}%2f..%2f..%2fuser.json",
        "/checkpoints/%2e%2e",
        "/api/v1/checkpoints/..%2f..%2fuser.json",
        "/api/v1/tasks/..%2f..%2fuser.json/logs",
        "/api/v1/users/..%2fuser.json/by-username",
        "/api/v1/experiments/..%2f1/model_def",
        "/api/v1/experiments/1%00/model_def",
        "/api/v1/experiments/1;DROP%20TABLE%20experiments",
        "/api/v1/trials/1%20OR%201=1",
        "/api/v1/templates/..%2f..%2fuser.json",
        "/api/v1/models/%27%20OR%201=1--",
        "/api/v1/agents/..%2f..",
        "/board/static/board.js%00.html",
        *(f"/api/v1/experiments/{number}" for number in ("0x1", "1_0", "%C2%B2", "1e3", "9" * 20, "-", "+1", "%201")),
        *(
            f"/board/live?once=1&view={view}&name={quote(name, safe='')}"
            for view in ("trial", "experiment", "run", "compare", "../all")
            for name in ("../../user.json", "/etc/passwd", "1'--", "1\0")
        ),
    )
]

_KILL = "/api/v1/experiments/1/kill"
UNREADABLE = [
    Hostile(f"{line}\r\n\r\n".replace("HOST", f"Host: {HOST}").encode("latin-1"), status)
    for line, status in (
        ("", (0,)),
        ("GET", (400,)),
        ("GET /info", (403,)),
        ("GET /info HTTP/1.0", (403,)),
        ("GET /info HTTP/0.9", (403,)),
        ("GET  /info HTTP/1.1\r\nHOST", (400,)),
        ("GET /in fo HTTP/1.1\r\nHOST", (400,)),
        ("GET\t/info\tHTTP/1.1\r\nHOST", (400,)),
        ("GET /\x00 HTTP/1.1\r\nHOST", (400,)),
        ("GET /\x1b[2J HTTP/1.1\r\nHOST", (400,)),
        ("GET /\xff HTTP/1.1\r\nHOST", (400,)),
        ("G\rT /info HTTP/1.1\r\nHOST", (400,)),
        ("GET /info HTTP/1.1\r\nHOST\r\nHOST", (403,)),
        ("GET /info HTTP/1.1\r\nHOST\r\n folded", (403,)),
        ("GET /info HTTP/1.1\r\nHost : {port}", (400,)),
        ("GET /info HTTP/1.1\r\nHOST\r\nno colon", (400,)),
        ("GET /info HTTP/1.1\r\nHOST\r\n: empty", (400,)),
        ("GET /info HTTP/1.1\r\nHOST\r\nA\x00: b", (400,)),
        (f"GET /api/v1/me HTTP/1.1\r\nHOST\r\nAuthorization: Bearer a\r\nAuthorization: Bearer {USER_TOKEN}", (401,)),
        ("GET /info HTTP/1.1\r\nHOST\r\nOrigin: null\r\nOrigin: http://127.0.0.1:{port}", (403,)),
        (f"GET /{'a' * 40_000} HTTP/1.1\r\nHOST", (431,)),
        (f"GET /info HTTP/1.1\r\nHOST\r\nX: {'a' * 40_000}", (431,)),
        ("GET /info HTTP/1.1\r\nHOST" + "\r\nX: a" * 20_000, (431,)),
        *((f"POST {_KILL} HTTP/1.1\r\nHOST\r\n{lines}", (0, 400, 413, 501)) for lines in (
            "Content-Length: 1\r\nContent-Length: 2",
            "Content-Length: 1\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            "Transfer-Encoding: gzip, chunked",
            "Transfer-Encoding: xchunked",
            "Transfer-Encoding:\x0bchunked",
            "Content-Length: -1",
            "Content-Length: +5",
            "Content-Length: 0x5",
            "Content-Length: 5 5",
            f"Content-Length: {'9' * 30}",
        )),
    )
]  # fmt: skip

_SMUGGLED = raw("POST", _KILL, token=USER_TOKEN)
BODIES = [
    Hostile(raw("PATCH", "/api/v1/experiments/1", token=USER_TOKEN, body=body), (400,))
    for body in (
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe{}",
        b"\x00",
        b"[" * 50_000,
        b'{"a":' * 500 + b"1" + b"}" * 500,
        b'{"name": "\\ud800"}',
        b'{"name": 1e999999}{}',
        b"<!DOCTYPE a [<!ENTITY x SYSTEM '/etc/passwd'>]><a>&x;</a>",
    )
] + [
    Hostile(raw("POST", "/api/v1/experiments", body=b"", length="1073741824"), (413,)),
    Hostile(raw("POST", "/api/v1/experiments", token=USER_TOKEN, length="1073741824"), (413,)),
    Hostile(raw("PATCH", "/api/v1/experiments/1", token=USER_TOKEN, length="999999999999999"), (413,)),
    Hostile(raw("PATCH", "/api/v1/experiments/1", "Expect: 100-continue", token=USER_TOKEN, length="1073741824"), (100,)),
    Hostile(raw("POST", "/api/v1/auth/login", body=b" " * 20_000), (413,)),
    Hostile(raw("POST", "/api/v1/auth/login", "Transfer-Encoding: chunked") + b"ffffff\r\n" + b"x" * 1000, (0,)),
    Hostile(raw("POST", "/api/v1/auth/login", "Transfer-Encoding: chunked") + b"-1\r\n", (400,)),
    Hostile(raw("POST", "/api/v1/auth/login", "Transfer-Encoding: chunked") + b"2\r\n{}x\r\n0\r\n\r\n", (400,)),
    Hostile(raw("POST", _KILL, length=str(len(_SMUGGLED.replace(b"{port}", b"12345")))) + _SMUGGLED, (0, 401)),
    Hostile(raw("POST", "/api/v1/auth/login", "Transfer-Encoding: chunked") + b"0\r\n" + _SMUGGLED + b"\r\n", (400, 403)),
    Hostile(raw("GET", "/api/v1/experiments?" + "a=1&" * 300, token=USER_TOKEN), (400,)),
    Hostile(raw("GET", "/api/v1/experiments?limit=99999999999", token=USER_TOKEN), (400,)),
    Hostile(raw("GET", "/api/v1/experiments?offset=NaN", token=USER_TOKEN), (400,)),
]  # fmt: skip

LOGINS = [
    Hostile(raw("POST", "/api/v1/auth/login", body=json_body(body)), status)
    for body, status in (
        ({"username": "determined", "password": ""}, (403,)),
        ({"username": "determined", "password": "", "isHashed": True}, (403,)),
        ({"username": "determined", "password": "determined"}, (403,)),
        ({"username": "off", "password": ""}, (403,)),
        ({"username": "admin", "password": ""}, (403,)),
        ({"username": "' OR 1=1 --", "password": "x"}, (403,)),
        ({"username": "determined\0", "password": "x"}, (403,)),
        ({"username": "determined", "password": {"$ne": ""}}, (400,)),
        ({"username": ["determined"], "password": "x"}, (400,)),
        ({"username": "determined", "password": None}, (400,)),
        ({}, (400,)),
    )
]

# A neighbor with an account, who is no administrator and owns nothing.
NOT_THEIRS = [
    Hostile(raw(method, path, token=NEIGHBOR_TOKEN, body=json_body(body)), (403, 409))
    for method, path, body in (
        ("DELETE", "/api/v1/experiments/1", {}),
        ("GET", "/api/v1/master/config", {}),
        ("POST", "/api/v1/users", {"user": {"username": "eve", "admin": True}, "password": "x"}),
        ("PATCH", "/api/v1/users/1", {"password": "x", "isHashed": True}),
        ("PATCH", "/api/v1/users/1", {"active": False}),
        ("PATCH", "/api/v1/users/2", {"admin": True}),
        ("PATCH", "/api/v1/users/2", {"username": "determined"}),
        ("POST", "/api/v1/agents/laptop/disable", {}),
        ("POST", "/api/v1/agents/laptop/slots/0/disable", {}),
        ("DELETE", "/api/v1/workspaces/1", {}),
        ("PATCH", "/api/v1/workspaces/1", {"name": "mine"}),
        ("POST", "/api/v1/workspaces/1/archive", {}),
        ("DELETE", "/api/v1/projects/1", {}),
        ("POST", "/api/v1/experiments/1/move", {"destinationProjectId": 1}),
    )
]

# A trial with the token of its run; test_app.py tries it on every route.
NOT_ITS_OWN = [
    Hostile(raw(method, path, f"{header}: Bearer {TASK_TOKEN}"), (401, 403))
    for header in ("Authorization", "Grpc-Metadata-x-allocation-token")
    for method, path in (
        ("GET", "/api/v1/experiments"),
        ("GET", "/board/live?once=1"),
        ("POST", "/api/v1/auth/logout"),
    )
] + [Hostile(raw("GET", "/api/v1/trials/2", f"Grpc-Metadata-x-allocation-token: Bearer {OTHER_TASK_TOKEN}"), (401,))]

KINDS: dict[str, list[Hostile]] = {
    "no token": NO_TOKEN,
    "a wrong token": WRONG_TOKEN,
    "another host": OTHER_HOST,
    "another page": OTHER_PAGE,
    "through us": THROUGH,
    "paths that lead out": LEADING_OUT,
    "unreadable": UNREADABLE,
    "bodies": BODIES,
    "logins": LOGINS,
    "not theirs": NOT_THEIRS,
    "not its own": NOT_ITS_OWN,
}


@dataclass(frozen=True)
class Target:
    world: World
    server: HttpServer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A master with its board, as `zero-trial master up` serves it."""
    world = World(tmp_path_factory.mktemp("hostile") / "root")
    world.write(1, "said by trial 1")
    world.save(UUID, 2)
    world.exit(2)  # its token is void
    for name, token in (("neighbor", NEIGHBOR_TOKEN), ("off", OFF_TOKEN)):
        world.add_user(name, token, active=name != "off")
    with world.state.database.transaction() as connection:
        user_rows.add_token(connection, digest(EXPIRED_TOKEN), user_id=1, expires=world.clock.now - 1)
    with listen(world, more=board_routes(StoreSource(world.directory))) as server:
        yield Target(world, server)
    world.close()


def answers(server: HttpServer, sent: bytes, silent: float = 0.3) -> bytes:
    """Return all that comes back until the server closes the connection. The client closes its side
    after so many seconds in which nothing comes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        found = b""
        try:
            sock.sendall(sent.replace(b"{port}", str(server.port).encode()))
            open_here = True
            while True:
                if open_here and not select.select([sock], [], [], silent)[0]:
                    sock.shutdown(socket.SHUT_WR)
                    open_here = False
                if not (data := sock.recv(65536)):
                    break
                found += data
        except ConnectionError:  # an answer came before all was sent
            pass
        return found


def test_they_are_as_many_as_the_guide_says_and_all_different() -> None:
    found = [one.sent for kind in KINDS.values() for one in kind]
    (said,) = re.findall(r"test_hostile\.py` sends some (\d+) of them", GUIDE.read_text(encoding="utf-8"))
    assert len(set(found)) == len(found) >= int(said)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hostile_neighbor_sends_is_refused(target: Target, kind: str) -> None:
    before = target.world.content()
    for one in KINDS[kind]:
        got = answers(target.server, one.sent, 30.0 if kind == "logins" else 0.3)  # passwords take long to check
        head = got.partition(b"\r\n\r\n")[0]
        assert int(got[9:12] or 0) in one.status and got.count(b"HTTP/1.") == (got != b""), (one.sent[:300], got[:300])
        assert not [word for word in SECRETS if word in got], (one.sent[:300], got)
        assert b"access-control-allow" not in head.lower() and b"set-cookie" not in head.lower()
    assert target.world.content() == before and not target.world.agent.killed
    alive = answers(target.server, raw("GET", "/api/v1/experiments", token=USER_TOKEN))
    assert alive.startswith(b"HTTP/1.1 200 ") and b"validation_loss" in alive
