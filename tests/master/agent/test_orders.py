"""Orders that fail, are tried again, and are overtaken by others of their allocation."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator

import pytest

from zero_trial.master.agent import resources
from zero_trial.master.agent.resources import OrderQueue

FULL = OSError(errno.EIO, "Input/output error")


class Field:
    """A queue at work, how often it has looked, and what was carried out."""

    def __init__(self) -> None:
        self.queue = OrderQueue("test")
        self.looks = threading.Semaphore(0)
        self.done: list[str] = []
        self.ended = threading.Event()
        self.queue.begin(self.looks.release, 0.001, lambda name, why: None)

    def wait_for_looks(self, count: int = 3) -> None:
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self.looks.acquire(timeout=60)

    def end(self) -> None:
        """Carry out what is there, and nothing more."""
        self.queue.put("last", self.ended.set)
        assert self.ended.wait(60)
        self.queue.close()


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Iterator[Field]:
    monkeypatch.setattr(resources, "_RETRY_SECONDS", (0.0,))
    made = Field()
    yield made
    made.queue.close()


def test_a_start_that_fails_while_a_kill_waits_is_not_tried_again(field: Field) -> None:
    begun, go, killed = threading.Event(), threading.Event(), threading.Event()

    def start() -> None:
        field.done.append("start")
        begun.set()
        assert go.wait(60)
        raise FULL

    def kill() -> None:
        field.done.append("kill")
        if field.done.count("kill") == 1:
            raise FULL
        killed.set()

    field.queue.put("a", start, begins=True)
    assert begun.wait(60)
    field.queue.put("b", field.wait_for_looks)  # meanwhile the start would come to its next attempt
    field.queue.put("a", kill)
    go.set()
    assert killed.wait(60)
    field.end()
    assert field.done == ["start", "kill", "kill"]


def test_a_start_does_not_undo_a_kill_that_is_late(field: Field) -> None:
    full, failed, killed = threading.Event(), threading.Event(), threading.Event()
    full.set()

    def kill() -> None:
        if full.is_set():
            failed.set()
            raise FULL
        field.done.append("kill")
        killed.set()

    field.queue.put("a", kill)
    assert failed.wait(60)
    field.queue.put("a", lambda: field.done.append("start"), begins=True)
    field.wait_for_looks()
    full.clear()
    assert killed.wait(60)
    field.end()
    assert field.done == ["kill"]


def test_a_fault_that_comes_again_is_said_once(field: Field, caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def kill() -> None:
        field.done.append("kill")
        if len(field.done) == 4:
            failed.set()
        if len(field.done) < 5:
            raise PermissionError(errno.EACCES, "denied")

    with caplog.at_level(logging.WARNING, resources.__name__):
        field.queue.put("a", kill)
        assert failed.wait(60)
    assert [record.message for record in caplog.records] == ["an order will be carried out later: [Errno 13] denied"]


def test_looks_that_fail_leave_no_trace_once_they_succeed(field: Field, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise FULL

    for look in (fails, fails, lambda: None, fails):
        field.queue.guarded("allocation a", look)
    assert [record.message for record in caplog.records] == 2 * [f"allocation a: OSError: {FULL}"]
    field.queue.guarded("allocation a", lambda: None)
    assert field.queue._faults == {}
