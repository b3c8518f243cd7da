"""Logs as the original client reads them, followed and not."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.master.http.conftest import Ask
from tests.master.world import BEGAN, USER_TOKEN, World
from zero_trial.master.http import listen
from zero_trial.master.http.server import HttpServer


@pytest.fixture(autouse=True)
def written(world: World) -> None:
    world.clock.now = BEGAN + 10
    world.write(1, "first", {"m": "second", "r": 1, "l": "ERROR"})


api = pytest.importorskip("determined.common.api")
bindings = pytest.importorskip("determined.common.api.bindings")


def test_lines_are_printed_as_a_cluster_prints_them(user: Any, world: World) -> None:
    world.write(1, "[rank=1] hello", "[rank=1] INFO: [55] root: x", "it says ERROR: x")
    world.state.log_to_trial(1, "it waits", "WARNING")
    for found in (list(api.trial_logs(user, 1)), list(api.task_logs(user, "task-1"))):
        assert [each.message for each in found] == [
            "[2023-11-14T22:13:24.000000Z] containe || first\n",
            "[2023-11-14T22:13:24.000000Z] containe [rank=1] || ERROR: second\n",
            "[2023-11-14T22:13:24.000000Z] containe [rank=1] || hello\n",
            "[2023-11-14T22:13:24.000000Z] containe [rank=1] || INFO: [55] root: x\n",
            "[2023-11-14T22:13:24.000000Z] containe || it says ERROR: x\n",
            "[2023-11-14T22:13:30.000000Z]          || WARNING: it waits\n",
        ]
        assert [each.log for each in found] == [
            "first", "second", "hello", "[55] root: x", "it says ERROR: x", "it waits",
        ]  # fmt: skip
        levels = bindings.v1LogLevel
        assert [each.level for each in found[:2]] == [levels.INFO, levels.ERROR]
        assert [(each.containerId, each.agentId, each.rankId, each.source) for each in (found[1], found[5])] == [
            ("container-1", "laptop", 1, "task"),
            (None, None, None, "master"),
        ]


def test_a_level_that_is_none_cannot_forge_a_line_or_change_the_terminal(user: Any, ask: Ask) -> None:
    line = {"task_id": "task-2", "log": "hello", "level": "\x1b]0;x\x07\n[rank=0] || forged", "rank": 3}
    assert ask("POST", "/task-logs", user=USER_TOKEN, body=[line])[0] == 200
    (found,) = api.trial_logs(user, 2)
    assert found.message.endswith("|| INFO: hello\n") and found.level is bindings.v1LogLevel.INFO and found.rankId == 3
    assert found.message.count("\n") == 1 and found.message.isascii() and "\x1b" not in found.message


def test_lines_are_chosen_as_asked_for(user: Any, world: World) -> None:
    wanted = {"m": "[x", "r": 1, "l": "ERROR", "t": BEGAN + 4}
    others = ({"r": 2}, {"l": "INFO"}, {"t": BEGAN + 3}, {"t": BEGAN + 6}, {"m": "y"})
    world.write(2, wanted, *({**wanted, "m": f"[x {other}", **other} for other in others))
    found = api.trial_logs(
        user,
        2,
        rank_ids=[0, 1],
        min_level=bindings.v1LogLevel.ERROR,
        timestamp_after="2023-11-14T22:13:24Z",
        timestamp_before="2023-11-14T22:13:25Z",
        search_text="[x",
    )
    assert [each.log for each in found] == ["[x"]


def test_every_filter_is_applied_before_the_limit(user: Any, world: World) -> None:
    for number in range(10):
        entry = {"m": str(number), "s": "stderr" if number % 2 else "stdout", "t": BEGAN + number}
        world.write(2, entry, run_id=0 if number > 7 else 1)

    def logs(**asked: Any) -> list[str]:
        return [each.log for each in api.trial_logs(user, 2, **asked)]

    assert logs(stdtypes=["stderr"], head=2) == ["1", "3"]
    assert logs(stdtypes=["stderr"], tail=2) == ["7", "9"]
    assert logs(sources=["master"]) == ["8", "9"]
    assert logs(rank_ids=[-1], head=1) == ["0"] and logs(rank_ids=[-2]) == logs(rank_ids=[0]) == []
    assert logs(agent_ids=["laptop"], head=1) == ["0"]
    assert logs(agent_ids=["elsewhere"]) == []
    assert logs(container_ids=["container-2"], head=1) == ["0"]
    assert logs(container_ids=["container-1"]) == []
    found = bindings.get_TrialLogs(user, trialId=2, searchText="[3-5]", enableRegex=True)
    assert [each.log for each in found] == ["3", "4", "5"]


@pytest.mark.parametrize("of", ["trials/1", "tasks/task-1"])
def test_an_expression_that_backtracks_for_ever_is_matched_in_linear_time(ask: Ask, world: World, of: str) -> None:
    world.write(1, "a" * 10_000 + "!")
    # A matcher that backtracks would not finish before the client's timeout.
    answer = ask("GET", f"/api/v1/{of}/logs?enableRegex=true&searchText=(a%2B)%2B%24", user=USER_TOKEN)
    assert answer == (200, {})


def test_followed_lines_come_while_more_are_awaited(user: Any, world: World) -> None:
    lines = iter(api.trial_logs(user, 1, follow=True))
    assert [next(lines).log, next(lines).log] == ["first", "second"]
    world.exit(1)
    assert [each.log for each in lines] == ["run 1 ended with exit code 0"]


def test_a_reader_that_stops_is_noticed_although_no_line_comes(
    server: HttpServer, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()
    read = world.trials.logs

    def watched(*asked: Any) -> Iterator[Any]:
        try:
            yield from read(*asked)
        finally:
            closed.set()

    monkeypatch.setattr(world.trials, "logs", watched)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/api/v1/trials/1/logs?follow=true", headers={"Authorization": f"Bearer {USER_TOKEN}"})
    answer = connection.getresponse()
    assert json.loads(answer.readline())["result"]["log"] == "first"
    answer.close()
    connection.close()
    assert closed.wait(60), "the lines are still being read for no one"


def test_followers_take_only_part_of_the_threads(world: World) -> None:
    with listen(world, threads=4) as server:
        session = api.Session(server.url, "determined", USER_TOKEN, None, max_retries=0)
        following = [iter(api.trial_logs(session, 1, follow=True)) for _ in range(3)]
        for lines in following:
            next(lines)
        with pytest.raises(api.errors.APIException, match="too many logs are being followed"):
            next(iter(api.trial_logs(session, 1, follow=True)))
        world.exit(1)
        for lines in following:
            assert [each.log for each in lines][-1] == "run 1 ended with exit code 0"
        assert next(iter(api.trial_logs(session, 1, follow=True))).log == "first"


def test_the_masters_own_log(user: Any, world: World) -> None:
    assert list(bindings.get_MasterLogs(user)) == []
    at, fault = "2026-01-31T12:00:0", "a fault\nTraceback\n  there"
    text = f"no entry\n{at}0.000Z INFO up\n{at}1.000Z ERROR {fault}\n{at}2.000Z INFO on\n"
    world.directory.log.write_text(text)
    entries = [each.logEntry for each in bindings.get_MasterLogs(user)]
    assert [(each.id, each.message) for each in entries] == [(0, "up"), (1, fault), (2, "on")]
    assert entries[1].level is bindings.v1LogLevel.ERROR
    assert [each.logEntry.message for each in bindings.get_MasterLogs(user, offset=-1)] == ["on"]
    assert [each.logEntry.message for each in bindings.get_MasterLogs(user, offset=1, limit=1)] == [fault]
    with pytest.raises(api.errors.APIException, match="zero-trial master logs"):
        list(bindings.get_MasterLogs(user, follow=True))


def test_escape_sequences_of_a_trial_do_not_reach_the_terminal(user: Any, world: World) -> None:
    world.write(2, "\x1b]0;title\x07\x1b[31mred\x1b[0m\tend")
    (found,) = api.trial_logs(user, 2)
    assert found.log == "red\tend" and found.message.endswith(" red\tend\n")
    world.write(1, "a\0b\x1b\0[31mc", run_id=2)
    assert list(api.trial_logs(user, 1))[-1].log == "a\0b\0[31mc"
