"""All routes together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zero_trial.master.api.router import Router, Who
from zero_trial.master.api.routes import all_routes
from zero_trial.master.api.routes_experiments import CONTEXT_BODY


def test_no_two_routes_answer_the_same() -> None:
    Router(all_routes())


def test_only_a_submission_may_be_large_and_only_a_login_is_read_from_anybody() -> None:
    large = {route.path for route in all_routes() if route.limit > 8 * 1024 * 1024}
    assert large == {"/api/v1/experiments"}
    assert {
        route.limit for route in all_routes() if route.path == "/api/v1/experiments" and route.method == "POST"
    } == {CONTEXT_BODY}
    assert all(
        route.limit <= 16 * 1024 for route in all_routes() if route.who is Who.ANYBODY and route.method == "POST"
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
