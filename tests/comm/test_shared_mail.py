"""Tickets through shared memory: in order, in a ring, and never overwritten before they are read."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest

from zero_trial.comm.shm.lending import BLOCK_BYTES, SLOTS, SharedHandleExchange
from zero_trial.comm.shm.segments import PeerProcesses, SegmentHandle, map_file

SHORT, LONG = timedelta(seconds=0.1), timedelta(seconds=30)


def pair(timeout: float = 0.1) -> tuple[SharedHandleExchange, SharedHandleExchange]:
    """Two ends in one process."""
    blocks = [os.memfd_create("test") for _ in range(2)]
    for block in blocks:
        os.ftruncate(block, BLOCK_BYTES)

    def end(own: int, other: int) -> SharedHandleExchange:
        others = {other: map_file(os.dup(blocks[other]))}
        return SharedHandleExchange(map_file(os.dup(blocks[own])), others, PeerProcesses({other: os.getpid()}), timeout)

    return end(0, 1), end(1, 0)


def ticket(number: int) -> SegmentHandle:
    return SegmentHandle(7, 8, number, 16 * number)


def test_each_hears_of_the_others_payload() -> None:
    left, right = pair()
    here, there = left.post(ticket(1), 5, [1]), right.post(ticket(2), 5, [0])
    here.wait(LONG), there.wait(LONG)
    assert (here.handles, there.handles) == ({1: ticket(2)}, {0: ticket(1)})


def test_several_are_under_way_and_are_read_in_any_order() -> None:
    left, right = pair()
    here = [left.post(ticket(k), k, [1]) for k in range(5)]
    there = [right.post(ticket(10 + k), k, [0]) for k in range(5)]
    for k in (3, 0, 4, 1, 2):
        here[k].wait(LONG), there[k].wait(LONG)
        assert (here[k].handles[1], there[k].handles[0]) == (ticket(10 + k), ticket(k))


def test_nobody_is_a_whole_ring_ahead() -> None:
    left, right = pair()
    kept = [left.post(ticket(k), k, []) for k in range(SLOTS)]
    for letters in kept:
        letters.wait(LONG)
    with pytest.raises(RuntimeError, match="timed out"):
        left.post(ticket(SLOTS), SLOTS, [])
    for k in range(SLOTS):
        letters = right.post(None, k, [0])
        letters.wait(LONG)
        assert letters.handles == {0: ticket(k)}


def test_what_nobody_waits_for_holds_nobody_up() -> None:
    left, right = pair()
    for k in range(3 * SLOTS):
        left.post(ticket(k), k, [1])
        right.post(ticket(k), k, [0])


def test_thousands_cross_in_order() -> None:
    left, right = pair(timeout=30.0)
    heard: list[int] = []

    def other() -> None:
        for k in range(3 * SLOTS):
            letters = right.post(ticket(k), k, [0])
            letters.wait(LONG)
            heard.append(letters.handles[0].generation)

    thread = threading.Thread(target=other)
    thread.start()
    for k in range(3 * SLOTS):
        letters = left.post(ticket(-k), k, [1])
        letters.wait(LONG)
        assert letters.handles[1].generation == k
    thread.join()
    assert heard == [-k for k in range(3 * SLOTS)]


def test_another_operation_is_told_apart() -> None:
    left, right = pair()
    here = left.post(ticket(1), 5, [1])
    right.post(ticket(1), 6, [0])
    with pytest.raises(RuntimeError, match="another operation"):
        here.wait(LONG)


def test_one_that_never_comes() -> None:
    left, _ = pair()
    with pytest.raises(RuntimeError, match="timed out"):
        left.post(ticket(1), 5, [1]).wait(SHORT)
