"""Which machines a trial gets, orders that fail and are tried again, and leases of allocations."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zero_trial.master.agent import resources
from zero_trial.master.agent.resources import (
    Exit,
    Identity,
    Node,
    OrderQueue,
    acquire_lease,
    exit_of,
    fit,
    forbid,
    identify,
    lease_exists,
    lease_owner,
    moved,
    never_begins,
    numbered,
    record_exit,
    shape,
)


@pytest.mark.parametrize(
    ("slots", "sizes", "parts"),
    [
        (1, [2, 2], (1, 1)),
        (2, [2, 2], (1, 2)),
        (2, [1, 1], (2, 1)),
        (4, [2, 2], (2, 2)),
        (3, [2, 2], None),
        (3, [2, 4], (1, 3)),
        (4, [2, 1, 2], (2, 2)),
        (6, [4, 4, 2], (2, 3)),
        (9, [4, 4], None),
        (0, [2], (1, 0)),
        (0, [], None),
    ],
)
def test_the_fewest_machines_in_equal_parts(slots: int, sizes: list[int], parts: tuple[int, int] | None) -> None:
    assert shape(slots, sizes) == parts


@pytest.mark.parametrize(
    ("nodes", "each", "free", "taken"),
    [
        (1, 1, [(0, 1), (3,)], (3,)),  # whole machines stay whole
        (1, 2, [(0,), (2, 3)], (2, 3)),
        (2, 1, [(1,), (2, 3)], (1, 2)),
        (2, 2, [(0, 1), (3,)], None),
        (1, 1, [(5, 4)], (4,)),
    ],
)
def test_free_slots(nodes: int, each: int, free: list[tuple[int, ...]], taken: tuple[int, ...] | None) -> None:
    assert fit(nodes, each, free) == taken


A, B = Node("a", 2, 0), Node("b", 2, 2)


@pytest.mark.parametrize(
    ("slots", "nodes", "holders", "after"),
    [
        ((0, 1), [A], {0: "x", 1: "x"}, {"x": (0, 1)}),
        ((0, 1), [B], {0: "x", 1: "x"}, {"x": (2, 3)}),
        ((0,), [B], {0: "x", 2: "y"}, {"x": (3,)}),
        ((0, 1), [B], {0: "x", 1: "x", 2: "y", 3: "z"}, {"x": (2, 3), "y": (0,), "z": (1,)}),
        ((0, 1), [A, B], {0: "x", 1: "x", 2: "y"}, {"x": (0, 3)}),
        ((0, 2), [B, A], {0: "x", 2: "x"}, {"x": (0, 2)}),
    ],
)
def test_the_engine_chose_other_machines(
    slots: tuple[int, ...], nodes: list[Node], holders: dict[int, str], after: dict[str, tuple[int, ...]]
) -> None:
    assert moved("x", slots, nodes, holders) == after


def test_numbers_of_slots_stay() -> None:
    first = numbered([], [Node("a", 2), Node("b", 1)])
    assert [(node.name, node.first, node.up) for node in first] == [("a", 0, True), ("b", 2, True)]
    second = numbered(first, [Node("b", 1), Node("c", 4)])  # a is gone
    assert [(node.name, node.first, node.up) for node in second] == [("a", 0, False), ("b", 2, True), ("c", 3, True)]
    third = numbered(second, [Node("a", 3), Node("b", 1, up=False), Node("c", 2)])  # a is back and larger
    assert [(node.name, node.first, node.slots) for node in third] == [("a", 7, 3), ("b", 2, 1), ("c", 3, 2)]
    assert [node.pools for node in second] == [(), ("default",), ("default",)]  # what is gone counts for no pool
    taken = [number for node in third for number in node.numbers]
    assert len(taken) == len(set(taken)) and not third[1].up


# -- orders

FULL = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[OrderQueue]:
    monkeypatch.setattr(resources, "_RETRY_SECONDS", (0.0,))
    queue = OrderQueue("test")
    queue.begin(lambda: None, 0.001, lambda name, why: None)
    yield queue
    queue.close()


def test_a_start_neither_outlives_nor_undoes_a_kill_that_is_late(orders: OrderQueue) -> None:
    begun, go, killed = threading.Event(), threading.Event(), threading.Event()
    done: list[str] = []

    def start() -> None:
        done.append("start")
        begun.set()
        assert go.wait(60)
        raise FULL

    def kill() -> None:
        done.append("kill")
        if done.count("kill") < 3:
            orders.put("a", start, begins=True)
            raise FULL
        killed.set()

    orders.put("a", start, begins=True)
    assert begun.wait(60)
    orders.put("a", kill)
    go.set()
    assert killed.wait(60)
    last = threading.Event()
    orders.put("b", last.set)
    assert last.wait(60) and done == ["start", "kill", "kill", "kill"]


def test_faults_that_come_again_are_logged_once(orders: OrderQueue, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []
    ended = threading.Event()

    def kill() -> None:
        tries.append(1)
        if len(tries) < 5:
            raise PermissionError(errno.EACCES, "denied")
        ended.set()

    def fails() -> None:
        raise FULL

    with caplog.at_level(logging.WARNING, resources.__name__):
        orders.put("a", kill)
        assert ended.wait(60)
        for look in (fails, fails, lambda: None, fails):
            orders.guarded("allocation a", look)
    assert [record.message for record in caplog.records] == [
        "an order is postponed: [Errno 13] denied",
        *2 * [f"allocation a: OSError: {FULL}"],
    ]


# -- leases


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "60"])
    yield made
    made.kill()
    made.wait()


def test_a_process_is_alive_until_it_ends_even_as_a_zombie(child: subprocess.Popen[bytes]) -> None:
    identity = identify(child.pid)
    assert identity.alive and identity.start
    identity.send(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert not identity.alive
    child.wait()
    assert not identity.alive
    identity.send(signal.SIGTERM)  # to no one


def test_another_process_is_neither_taken_for_this_one_nor_signalled(child: subprocess.Popen[bytes]) -> None:
    identity = identify(child.pid)
    boot, _, tick = identity.start.partition(":")
    before = Identity(child.pid, f"{boot[::-1]}:{tick}")
    assert before.before_boot and not identity.before_boot
    for other in (Identity(child.pid, "1"), before, Identity(0, ""), Identity(-1, "")):  # 0 is our group to kill(2)
        assert not other.alive
        other.send(signal.SIGKILL)
    assert child.poll() is None


def test_the_first_claim_holds(tmp_path: Path) -> None:
    assert not lease_exists(tmp_path) and lease_owner(tmp_path) is None
    assert acquire_lease(tmp_path, Identity(1, "2"))
    assert not acquire_lease(tmp_path, Identity(3, "4")) and not acquire_lease(tmp_path, None)
    assert lease_owner(tmp_path) == Identity(1, "2") and lease_exists(tmp_path)
    void = tmp_path / "void"
    void.mkdir()
    assert acquire_lease(void, None) and not acquire_lease(void, Identity(1, "2"))
    assert lease_exists(void) and lease_owner(void) is None


def test_the_end_of_what_never_begins_appears_with_its_void_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two a watch would take it for one that was killed, and not for a failure."""
    ended, seen, plain = Exit(127, 1.0, why="no folder"), [], os.link

    def link(draft: Path, place: Path) -> None:
        plain(draft, place)
        seen.append(exit_of(tmp_path / "new"))

    monkeypatch.setattr(os, "link", link)
    assert forbid(tmp_path / "new", ended) and seen == [ended] and never_begins(tmp_path / "new")
    assert not forbid(tmp_path / "new", Exit(0, 2.0)) and exit_of(tmp_path / "new") == ended


def test_on_a_full_disk_a_lease_that_was_taken_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").mkdir()
    assert acquire_lease(tmp_path / "taken", Identity(1, "2"))

    def write_text(path: Path, *_: object, **__: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    assert not acquire_lease(tmp_path / "taken", None)
    with pytest.raises(OSError, match="No space"):
        acquire_lease(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_of_many_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_have_looked = threading.Barrier(4, timeout=30)
    write_text = Path.write_text

    def wait_and_write(path: Path, text: str, encoding: str) -> int:
        all_have_looked.wait()
        return write_text(path, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", wait_and_write)
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda _: acquire_lease(tmp_path, None), range(4)))
    assert won.count(True) == 1 and [path.name for path in tmp_path.iterdir()] == ["claim.json"]


def test_an_exit_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert exit_of(tmp_path) is None
    record_exit(tmp_path, Exit(3, 5.0, killed=True, why="so"))
    assert exit_of(tmp_path) == Exit(3, 5.0, killed=True, why="so")
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_files_that_a_power_cut_left_empty_are_a_lease_without_an_owner(tmp_path: Path) -> None:
    for content in ("", '{"pid"', "\0\0\0", "3"):
        (tmp_path / "claim.json").write_text(content)
        (tmp_path / "exit.json").write_text(content)
        assert lease_exists(tmp_path) and lease_owner(tmp_path) is None and exit_of(tmp_path) is None
