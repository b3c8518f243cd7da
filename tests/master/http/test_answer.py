"""Bodies and streams as they go out."""

from __future__ import annotations

import json
import math

from zero_trial.master.http.response import encode, failure, finite, lines, ok


def test_an_answer_is_compact_json() -> None:
    assert ok({"a": [1, "ä"]}).body == '{"a":[1,"ä"]}'.encode()


def test_numbers_that_json_does_not_know_become_protobufs_words() -> None:
    value = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": (math.nan,)}
    assert json.loads(encode(value)) == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5], "c": ["NaN"]}
    assert finite(1.5) == 1.5


def test_text_that_is_not_unicode_does_not_break_an_answer() -> None:
    assert json.loads(encode({"a": "\udcff"})) == {"a": "?"}


def test_a_failure_says_it_where_both_kinds_of_clients_look() -> None:
    answer = failure(404, "there is no trial 7")
    body = json.loads(answer.body)
    assert answer.status == 404
    assert body["message"] == body["error"]["error"] == "there is no trial 7"


def test_lines_go_out_together_unless_they_are_followed() -> None:
    values = [{"n": 1}, {"n": 2}]
    assert list(lines(values, follow=False).pieces) == [b'{"result":{"n":1}}\n{"result":{"n":2}}\n']
    assert list(lines([*values, None], follow=True).pieces) == [b'{"result":{"n":1}}\n', b'{"result":{"n":2}}\n', b""]


def test_many_lines_are_sent_before_the_last_one_is_made() -> None:
    made = []

    def values():  # type: ignore[no-untyped-def]
        for number in range(1000):
            made.append(number)
            yield {"text": "x" * 1000}

    first = next(lines(values(), follow=False).pieces)
    assert 64 * 1024 <= len(first) < 70 * 1024
    assert len(made) < 100


def test_a_stream_that_was_never_begun_lets_go_what_it_holds() -> None:
    ended = []
    stream = lines(iter(()), follow=True, done=lambda: ended.append("done"))
    stream.close()
    assert ended == ["done"]
