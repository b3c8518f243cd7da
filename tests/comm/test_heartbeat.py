"""Tests for zero_trial/comm/waits.py."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.support.pool import Pools, logged_lines
from zero_trial.comm import MeshShape, build_mesh, waits
from zero_trial.comm.diagnosis import names
from zero_trial.comm.waits import CallOrder, Heartbeat

PATIENCE = 30.0


class FakeStore:
    """A key-value store in this process; ``until`` waits for what a board's thread writes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.writes = 0
        self.gone = False
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            if self.gone:
                self.changed.notify_all()
                raise RuntimeError("Connection reset by peer")
            self.values[key] = value
            self.writes += 1
            self.changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.values[key] = str(int(self.values.get(key, 0)) + amount)
            return int(self.values[key])

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)

    def until(self, true: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(true, PATIENCE)


def said(caplog: pytest.LogCaptureFixture, lines: int) -> list[str]:
    """What has been logged, once it is so many lines."""
    deadline = time.monotonic() + PATIENCE
    while len(caplog.messages) < lines and time.monotonic() < deadline:
        time.sleep(0.02)
    return caplog.messages


def test_a_rank_sees_where_the_others_are() -> None:
    store = FakeStore()
    first, second = Heartbeat(store, 0, 2), Heartbeat(store, 1, 2)
    second.step = 17
    second.enter("all_gather(block.3) over shard")
    assert store.until(lambda: "block.3" in store.values.get("zero_trial/heartbeat/1/1", ""))
    at = first.positions()[1]
    assert at is not None
    assert (at.step, at.sequence, at.operation, at.inside) == (17, 1, "all_gather(block.3) over shard", True)
    first.close()
    second.close()


def test_a_rank_does_not_see_where_the_others_were_in_an_earlier_process_group() -> None:
    store = FakeStore()
    earlier = Heartbeat(store, 1, 2)
    earlier.enter("all_gather(block.3) over shard")
    assert store.until(lambda: any("block.3" in value for value in store.values.values()))
    Heartbeat(store, 0, 2).close()
    earlier.close()
    now = Heartbeat(store, 0, 2)
    assert now.positions()[1] is None
    again = Heartbeat(store, 1, 2)
    again.enter("all_gather(block.4) over shard")
    assert store.until(lambda: any("block.4" in value for value in store.values.values()))
    at = now.positions()[1]
    assert at is not None and at.operation == "all_gather(block.4) over shard"
    now.close()
    again.close()


def test_leaving_twice_and_waiting_do_not_count() -> None:
    """Only entering a collective counts: two ranks that wait at different times stay comparable."""
    board = Heartbeat(None, 0, 1)
    board.leave()
    assert board.sequence == 0
    board.enter("a")
    board.leave()
    board.enter("b")
    board.leave()
    board.leave()
    board.enter("a", again=True)
    at = board.positions()[0]
    assert at is not None and (at.sequence, at.operation, at.inside) == (2, "a", True)
    board.leave()
    assert board.sequence == 2


def test_a_rank_that_said_nothing_and_a_damaged_entry_are_none() -> None:
    store = FakeStore()
    board = Heartbeat(store, 0, 3)
    store.set("zero_trial/heartbeat/1/2", "{not json")
    assert board.positions()[1] is None and board.positions()[2] is None
    board.close()


def test_only_changes_are_published_and_closing_ends_the_thread() -> None:
    store = FakeStore()
    before = threading.active_count()
    board = Heartbeat(store, 0, 2)
    assert store.until(lambda: store.writes == 1)
    board.close()
    assert store.writes == 1 and threading.active_count() <= before
    board.close()


def test_the_thread_ends_when_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    store.gone = True
    board = Heartbeat(store, 0, 2)
    thread = board._thread
    assert thread is not None
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_thread_ends_before_the_interpreter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a script has destroyed the group itself."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(waits.atexit, "register", registered.append)
    board = Heartbeat(FakeStore(), 0, 2)
    assert registered == [board.close]
    registered[0]()
    assert board._thread is None


def test_seconds_in_collectives_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("zero_trial.comm.waits.time.time", lambda: now[0])
    board = Heartbeat(None, 0, 1)
    board.enter("a")
    now[0] = 102.0
    board.leave()
    now[0] = 110.0
    board.leave()  # nothing to leave
    board.enter("b", again=True)
    now[0] = 110.5
    board.leave()
    assert board.waited == 2.5


def moving(heartbeat: Heartbeat, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        heartbeat.enter("step")
        heartbeat.leave()
        time.sleep(0.01)


def test_a_rank_that_moves_publishes_at_its_interval_and_one_that_stands_still_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "PERIOD_SECONDS", 0.02)
    store = FakeStore()
    heartbeat = Heartbeat(store, 0, 100_000)
    moving(heartbeat, 0.5)
    assert store.writes == 1, "the start"
    monkeypatch.setattr(waits, "STILL_SECONDS", 0.2)
    assert store.until(lambda: store.writes == 2)
    heartbeat.enter("all_reduce(x)")
    heartbeat.give_up()
    assert store.until(lambda: store.writes == 3) and json.loads(store.values["zero_trial/heartbeat/1/0"])["gave_up"]
    heartbeat.close()


def test_one_of_the_ranks_that_wait_long_names_the_late_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(waits, "SLOW_SECONDS", 0.3)
    store = FakeStore()
    all_ranks = [Heartbeat(store, rank, 4) for rank in range(4)]
    with caplog.at_level(logging.WARNING, "zero_trial"):
        for heartbeat in all_ranks:
            heartbeat._report_after = 0.3
            heartbeat.enter("before", (0, 1, 2))
            heartbeat.leave()
        for rank in (0, 2):
            all_ranks[rank].enter("all_gather(parameters of h.0) over data", (0, 1, 2))
        assert len(said(caplog, 1)) == 1
        assert (
            "step 0, all_gather(parameters of h.0) over data: has waited 0 s for rank 1. rank 1 at step 0, after before"
            in caplog.messages[0]
        )
        assert "gathers h.0" in caplog.messages[0]  # and what to do where ranks differ in that
        for rank in (0, 2):
            all_ranks[rank].leave()
        assert "continues: all_gather(parameters of h.0) over data took" in said(caplog, 2)[1]
    for heartbeat in all_ranks:
        heartbeat.close()


def test_ranks_that_wait_for_each_other_say_so_where_nothing_ends_their_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As through a backend's own collectives: of each rank one line, with the lines of both."""
    monkeypatch.setattr(waits, "PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(waits, "STUCK_SECONDS", 0.1)
    store = FakeStore()
    pair = [Heartbeat(store, rank, 2) for rank in range(2)]
    orders = [(CallOrder(1, "world"), CallOrder(1, "shard")) for _ in pair]
    with caplog.at_level(logging.ERROR, "zero_trial"):
        for heartbeat, (world, shard), first in zip(pair, orders, (True, False), strict=True):
            heartbeat._interval = 0.02
            heartbeat.watch_calls(world)
            heartbeat.watch_calls(shard)
            order = world if first else shard
            order.note("x")
            heartbeat.enter("a save" if first else "a reduction", (0, 1), order.call, again=True)
        said(caplog, 2)
        assert [heartbeat.is_crossed() for heartbeat in pair] == [True, True]
        for heartbeat in pair:
            heartbeat.close()
    of_first, of_second = sorted(caplog.messages)
    assert "rank 0, step 0, a save: this rank and rank 1 wait for each other" in of_first
    assert "rank 1 at step 0, in a reduction" in of_first and __file__ in of_first
    assert "rank 0 at step 0, in a save" in of_second


def stopped_for_a_while(seconds: float) -> list[str]:
    lines = logged_lines()
    mesh = build_mesh(MeshShape(shard=dist.get_world_size()))
    slow, waits.SLOW_SECONDS = waits.SLOW_SECONDS, 0.5
    mesh.heartbeat._report_after = 0.5
    mesh.shard.barrier("before")
    time.sleep(2 * waits.PERIOD_SECONDS)
    if mesh.rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    mesh.shard.barrier("training goes on")
    time.sleep(4 * waits.PERIOD_SECONDS)
    waits.SLOW_SECONDS = slow
    mesh.heartbeat._report_after = slow
    return lines


def test_a_rank_that_was_stopped_is_named_here_and_there(ranks: Pools) -> None:
    waiting, stopped = ranks(2).run(stopped_for_a_while, 1.3)
    assert any("training goes on" in line and "for rank 1. rank 1 at step" in line for line in waiting), waiting
    assert any("continues: all_reduce(training goes on)" in line for line in waiting), waiting
    assert any(line.startswith("rank 1 did not run for") for line in stopped), stopped


def test_of_many_ranks_the_first_are_named() -> None:
    assert names(range(3)) == "rank 0, rank 1, rank 2" and names(range(100)).endswith("rank 7, and 92 more ranks")
