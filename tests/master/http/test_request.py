"""Requests are read in one way only, within their limits; and what a route reads of a request."""

from __future__ import annotations

import math
import socket
import threading
import time
from typing import Any

import pytest

from tests.master.world import allocation
from zero_trial.master.core.accounts import Principal
from zero_trial.master.http.messages import BadRequest, Gone, Request, Waits, parse_query, real, split_path, when, whole
from zero_trial.master.http.server import Reader, parse_head
from zero_trial.master.records import Invalid, PermissionDenied, User, parse_time


def test_a_head_is_a_method_a_path_a_query_and_headers() -> None:
    head = parse_head(b"GET /api/v1/trials/3?limit=2 HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAuthorization: Bearer abc ")
    assert (head.method, head.path, head.query_text, head.length, head.keep_alive) == (
        "GET",
        "/api/v1/trials/3",
        "limit=2",
        0,
        True,
    )
    assert head.bearer("authorization") == "abc"
    assert head.bearer("grpc-metadata-x-allocation-token") is None


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (b"", 400),
        (b"GET / HTTP/1.0", 505),
        (b"GET / HTTP/2", 505),
        (b"GET  / HTTP/1.1", 400),
        (b"GET http://elsewhere/ HTTP/1.1", 400),
        (b"GET /\x1b[2J HTTP/1.1", 400),
        (b"G\x07T / HTTP/1.1", 400),
        (b"G\xc3\x89T / HTTP/1.1", 400),
        (b"GET / HTTP/1.1\r\nno colon", 400),
        (b"GET / HTTP/1.1\r\n folded: yes", 400),
        (b"GET / HTTP/1.1\r\nHost : spaced", 400),
        (b"GET / HTTP/1.1\r\nX: a\rHost: b", 400),
        (b"GET / HTTP/1.1\r\nX: \0", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\xa0", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: +1", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1_0", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: \xb2", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 30, 400),
    ],
)
def test_what_two_readers_could_read_in_two_ways_is_refused(block: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_head(block)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("header", "token"), [("Bearer a", "a"), ("bearer  a", "a"), ("Basic a", None), ("Bearer ", None), ("", None)]
)
def test_only_a_bearer_token_is_one(header: str, token: str | None) -> None:
    assert parse_head(b"GET / HTTP/1.1\r\nAuthorization: " + header.encode()).bearer("authorization") == token


def test_a_path_is_unquoted_part_by_part() -> None:
    assert split_path("/api/v1/users/a%2Fb%20c/") == ["api", "v1", "users", "a/b c"]
    assert split_path("/a//b") == ["a", "", "b"]


def test_a_query_with_too_many_fields_is_refused() -> None:
    assert parse_query("a=1&a=2&b=") == {"a": ["1", "2"], "b": [""]}
    with pytest.raises(BadRequest):
        parse_query("&".join("a=1" for _ in range(300)))


@pytest.fixture
def pair() -> tuple[socket.socket, Reader]:
    client, server = socket.socketpair()
    return client, Reader(server)


def test_two_requests_that_come_together_are_read_one_after_the_other(pair: tuple[socket.socket, Reader]) -> None:
    client, reader = pair
    client.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcGET /b HTTP/1.1\r\n\r\n")
    head = reader.head(idle=5, seconds=5)
    assert reader.body(head, 10) == b"abc"
    assert reader.head(idle=5, seconds=5).path == "/b"


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_it_does_not_matter_how_the_bytes_are_cut(pair: tuple[socket.socket, Reader], step: int) -> None:
    client, reader = pair
    text = (
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n10;x=y\r\n"
        + b"d" * 16
        + b"\r\n0\r\nTrailer: x\r\n\r\n"
    )

    def send() -> None:
        for start in range(0, len(text), step):
            client.sendall(text[start : start + step])

    thread = threading.Thread(target=send)
    thread.start()
    head = reader.head(idle=5, seconds=5)
    assert reader.body(head, 100) == b"abc" + b"d" * 16
    thread.join()


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"-1\r\n",
        b"\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"FFFFFFFF\r\n",
        b"5\r\nabcde\r\n5\r\nabcde\r\n5\r\n",
        b"1" * 2000,
    ],
)
def test_a_chunked_body_that_is_wrong_or_too_long_is_refused(pair: tuple[socket.socket, Reader], chunks: bytes) -> None:
    client, reader = pair
    client.sendall(b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    with pytest.raises(BadRequest) as caught:
        reader.body(reader.head(idle=5, seconds=5), 12)
    assert caught.value.status in (400, 413)


def test_a_body_that_says_that_it_is_too_long_is_not_read(pair: tuple[socket.socket, Reader]) -> None:
    client, reader = pair
    client.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
    with pytest.raises(BadRequest) as caught:
        reader.body(reader.head(idle=5, seconds=5), 1000)
    assert caught.value.status == 413


def test_headers_without_end_are_refused(pair: tuple[socket.socket, Reader]) -> None:
    client, reader = pair
    client.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 8000)
    with pytest.raises(BadRequest) as caught:
        reader.head(idle=5, seconds=5)
    assert caught.value.status == 431


def test_a_head_that_trickles_runs_out_of_time_however_often_bytes_come(pair: tuple[socket.socket, Reader]) -> None:
    client, reader = pair
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.01):
            client.sendall(b"X")

    thread = threading.Thread(target=trickle)
    thread.start()
    started = time.monotonic()
    with pytest.raises(BadRequest) as caught:
        reader.head(idle=5, seconds=0.2)
    ended.set()
    thread.join()
    assert caught.value.status == 408
    assert time.monotonic() - started < 4


def test_silence_and_a_hang_up_are_no_bad_requests(pair: tuple[socket.socket, Reader]) -> None:
    client, reader = pair
    with pytest.raises(Gone):
        reader.head(idle=0.02, seconds=1)
    client.close()
    with pytest.raises(Gone):
        reader.head(idle=5, seconds=1)


@pytest.mark.parametrize(("size", "refused"), [(32_000, False), (33_000, True), (40_000, True)])
def test_headers_that_come_at_once_may_not_pass_the_limit_either(size: int, refused: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(b"GET / HTTP/1.1\r\nX: " + b"a" * size + b"\r\n\r\n",))
        sender.start()
        try:
            if refused:
                with pytest.raises(BadRequest) as caught:
                    Reader(ours).head(idle=5, seconds=5)
                assert caught.value.status == 431
            else:
                assert len(Reader(ours).head(idle=5, seconds=5).headers["x"]) == size
        finally:
            ours.close()
            sender.join()


USER = Principal(user=User(1, "someone", admin=False, active=True, password=""))
TASK = Principal(allocation=allocation(1, 1))


def call(query: str = "", body: bytes = b"", principal: Principal = USER) -> Request:
    master: Any = None  # none of these questions needs one
    head = parse_head(b"GET / HTTP/1.1")
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


def test_a_body_is_an_object_or_nothing() -> None:
    assert call(body=b"").body() == call(body=b"null").body() == {}
    assert call(body=b'{"a": 1}').body() == {"a": 1}
    with pytest.raises(BadRequest):
        call(body=b"[1]").body()


def test_an_allocation_is_no_user_and_asks_for_its_own() -> None:
    asked = call(principal=TASK)
    asked.own(trial_id=1, allocation_id="task-1.1")
    for wrong in ({"trial_id": 2}, {"trial_id": "1"}, {"allocation_id": None}, {"anything": 1}):
        with pytest.raises(PermissionDenied):
            asked.own(**wrong)
    with pytest.raises(PermissionDenied):
        _ = asked.user
    with pytest.raises(PermissionDenied):
        asked.require_admin()


def test_a_user_asks_for_anything_but_is_no_administrator_for_that() -> None:
    asked = call()
    asked.own(trial_id=7)
    assert asked.user.name == "someone"
    with pytest.raises(PermissionDenied):
        asked.require_admin()


def test_places_to_wait_are_counted_and_given_back() -> None:
    waits = Waits(1)
    with waits.one() as first, waits.one() as second:
        assert (first, second) == (True, False)
    with waits.one() as again:
        assert again


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
