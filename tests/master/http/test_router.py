"""Paths lead to routes."""

from __future__ import annotations

import pytest

from zero_trial.errors import ZeroTrialError
from zero_trial.master.http.app import Router, why_unsupported
from zero_trial.master.http.messages import Response, Route


def route(method: str, path: str) -> Route:
    return Route(method, path, lambda call: Response())


ROUTER = Router(
    [
        route("GET", "/a"),
        route("POST", "/a"),
        route("GET", "/a/{number:int}"),
        route("GET", "/a/{name}/b"),
        route("GET", "/a/special"),
        route("DELETE", "/a/{number:int}/b/{other}"),
    ]
)


def test_a_route_is_found_by_method_and_path() -> None:
    found = ROUTER.find("DELETE", ["a", "7", "b", "x y"])
    assert found is not None
    assert (found.route.path, dict(found.args), list(found.numbers)) == (
        "/a/{number:int}/b/{other}",
        {"number": "7", "other": "x y"},
        ["number"],
    )


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "a", "/a"),
        ("POST", "a", "/a"),
        ("PUT", "a", None),
        ("GET", "a/special", "/a/special"),
        ("GET", "a/special/b", "/a/{name}/b"),
        ("GET", "a/7", "/a/{number:int}"),
        ("GET", "a/7/b", "/a/{name}/b"),
        ("GET", "a/", None),
        ("GET", "a//b", None),
        ("GET", "b", None),
        ("GET", "", None),
        ("GET", "a/7/b/c/d", None),
    ],
)
def test_literal_parts_win_and_nothing_is_guessed(method: str, path: str, expected: str | None) -> None:
    found = ROUTER.find(method, path.split("/"))
    assert (found.route.path if found else None) == expected


def test_two_routes_for_the_same_thing_are_a_fault_of_ours() -> None:
    with pytest.raises(ZeroTrialError, match="two routes"):
        Router([route("GET", "/a/{x}"), route("GET", "/a/{y}")])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/v1/notebooks", "not run"),
        ("/api/v1/tensorboards/7/kill", "tensorboard --logdir"),
        ("/api/v1/trials/7/retain_logs", "logs are kept"),
        ("/api/v1/workspaces/1/namespace-bindings", "no namespaces"),
    ],
)
def test_parts_of_determined_that_are_not_here(path: str, words: str) -> None:
    assert words in (why_unsupported(path) or "")


@pytest.mark.parametrize(
    "path", ["", "/", "/api", "/api/v1", "/api/v1/inventions", "/api/v1/notebooksx", "/metadata/x"]
)
def test_an_unknown_status_has_no_reason(path: str) -> None:
    assert why_unsupported(path) is None
