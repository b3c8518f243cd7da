"""Requests are read in one way only, within their limits of size and time."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from zero_trial.master.http.request import BadRequest, Gone, Reader, parse_head, parse_query, split_path


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


def head_of(reader: Reader, seconds: float = 5.0) -> object:
    return reader.head(idle=5.0, seconds=seconds)


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
