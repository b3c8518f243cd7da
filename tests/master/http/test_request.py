"""What a route reads of a request."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from zero_trial.master.core.accounts import Principal
from zero_trial.master.http.messages import (
    BadRequest,
    Request,
    RequestHead,
    Waits,
    parse_query,
    real,
    split_path,
    when,
    whole,
)
from zero_trial.master.records import Invalid, User, parse_time


def test_a_path_is_unquoted_part_by_part() -> None:
    assert split_path("/api/v1/users/a%2Fb%20c/") == ["api", "v1", "users", "a/b c"]
    assert split_path("/a//b") == ["a", "", "b"]


USER = Principal(user=User(1, "someone", admin=False, active=True, password=""))


def call(query: str = "", body: bytes = b"", principal: Principal = USER) -> Request:
    master: Any = None  # none of these questions needs one
    head = RequestHead("GET", "/", "", {}, 0)
    return Request(master, head, {}, {}, parse_query(query), body, principal, Waits(1))


@pytest.mark.parametrize(
    ("query", "expected", "account"),
    [
        ("", [0, 1, 2, 3, 4], (0, 5)),
        ("offset=1&limit=2", [1, 2], (1, 3)),
        ("offset=4&limit=2", [4], (4, 5)),
        ("offset=9&limit=2", [], (5, 5)),
        ("limit=0", [0, 1, 2, 3, 4], (0, 5)),
        ("limit=-1", [0, 1, 2, 3, 4], (0, 5)),
        ("limit=-2", [], (0, 0)),
        ("offset=-3", [0, 1, 2, 3, 4], (0, 5)),
    ],
)
def test_pages_are_counted_as_clients_expect(query: str, expected: list[int], account: tuple[int, int]) -> None:
    page, pagination = call(query).page(range(5))
    assert (list(page), (pagination["startIndex"], pagination["endIndex"]), pagination["total"]) == (
        expected,
        account,
        5,
    )


@pytest.mark.parametrize(
    "value", ["", "x", "1.5", 1.5, True, None, [], "１", "1_0", 2**40, float("nan"), float("inf"), " 1"]
)
def test_a_whole_number_is_one(value: Any) -> None:
    with pytest.raises(Invalid):
        whole(value, "limit")
    assert (whole("-3", "limit"), whole(7, "limit"), whole(4.0, "limit")) == (-3, 7, 4)


@pytest.mark.parametrize("value", ["x", None, True, math.nan, math.inf, "1e999", {}])
def test_a_number_is_finite(value: Any) -> None:
    with pytest.raises(Invalid):
        real(value, "weight")
    assert real("0.5", "weight") == 0.5


def test_a_moment_is_rfc_3339() -> None:
    assert (
        parse_time("1970-01-01T00:00:01Z", "timestampAfter")
        == parse_time("1970-01-01T01:00:01.000+01:00", "timestampAfter")
        == 1.0
    )
    with pytest.raises(Invalid, match="timestampAfter must be a time"):
        parse_time("yesterday", "timestampAfter")


def test_a_time_without_a_zone_is_in_utc_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert parse_time("1970-01-01T00:00:01", "reportTime") == 1.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+00:01"])
def test_a_moment_can_be_written_in_utc(text: str) -> None:
    with pytest.raises(Invalid, match="years 1 to 9999"):
        parse_time(text, "reportTime")
    for edge in ("9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"):
        assert when(parse_time(edge, "reportTime")) == edge.replace("Z", ".000Z")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"lines": [{"log": "a\\ud800"}]}', r"half a character .* at \$\.lines\[0\]\.log"),
        (b'{"a": {"\\udc00": 1}}', r"in a key at \$\.a"),
        (b'{"a": "\xed\xa0\x80"}', "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", "more than 100 levels"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not JSON|levels"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
    ],
)  # fmt: skip
def test_bodies_that_cannot_be_stored_or_walked(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        call(body=body).body()
    assert caught.value.status == 400


def test_whole_characters_and_ordinary_nesting_pass() -> None:
    assert call(body=b'{"a": "\\ud83d\\ude00\\u00e9", "b": [[[1]]]}').body() == {"a": "\U0001f600\u00e9", "b": [[[1]]]}
    wide = b'{"a": [' + b",".join([b"[1]"] * 500) + b"]}"
    assert len(call(body=wide).body()["a"]) == 500
