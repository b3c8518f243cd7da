"""All routes together."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.master.fakes import Master
from zero_trial.master.auth import Principal
from zero_trial.master.http.app import Application, all_routes
from zero_trial.master.http.request import parse_head
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
        route.limit <= 16 * 1024 for route in all_routes() if route.who is AuthLevel.ANYBODY and route.method == "POST"
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


SOURCES = Path(__file__).parents[3] / "zero_trial" / "master" / "http"
FIELDS = sorted(
    {name for path in SOURCES.rglob("*.py") for name in re.findall(r'"([a-zA-Z][A-Za-z]+)"', path.read_text())}
)
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1",
    "\ud800",
    "\0",
    [],
    {},
    3.5,
]
PARTS = ["1", "2", "0", "-1", "x", "9" * 20, "%00", "%ED%A0%80", "a%2Fb"]
WORDS = ["1", "-1", "x", "", "9" * 12, "NaN", "%00", "%ED%A0%80", "true", "ORDER_BY_DESC"]


class Open(Application):
    """A gate through which everybody comes as an administrator."""

    def _principal(self, head: Any, found: Any) -> Principal:
        return Principal(user=User(1, "determined", admin=True, active=True, password=""))


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    if depth < 3 and rng.random() < 0.3:
        values = [odd_value(rng, depth + 1) for _ in range(3)]
        return values if rng.random() < 0.5 else dict(zip(rng.sample(FIELDS, 3), values, strict=True))
    return rng.choice(ODD)


def odd_body(rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice([b"[", b'"x"', b"null", b"[" * 100_000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"\xff\xfe"])
    return json.dumps({rng.choice(FIELDS): odd_value(rng) for _ in range(rng.randrange(9))}).encode()


@pytest.mark.parametrize("route", list(all_routes()), ids=lambda route: f"{route.method} {route.path}")
def test_whatever_is_asked_the_master_has_an_answer(route: Any, master: Master) -> None:
    """Names, numbers, text and bodies that make no sense are the asker's fault: 4xx, never a 500."""
    master.create()
    master.validate(1, 0.5)
    gate = Open(master.cluster, Router(all_routes()), port=1, waits=1)
    rng = random.Random(f"{route.method} {route.path}")
    for _ in range(8):
        path = re.sub(r"\{[^}]*\}", lambda _: rng.choice(PARTS), route.path)
        query = "&".join(f"{name}={rng.choice(WORDS)}" for name in rng.sample(FIELDS, 3) if name != "follow")
        body = odd_body(rng)
        head = parse_head(f"{route.method} {path}?{query} HTTP/1.1\r\nHost: 127.0.0.1:1".encode())
        answer = gate(head, lambda limit, body=body: body)  # type: ignore[misc]
        if isinstance(answer, StreamingResponse):
            list(islice(answer.pieces, 3))
            answer.close()
        assert answer.status < 500 or answer.status == 501, (path, query, body[:300])
