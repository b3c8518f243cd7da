"""JSON-able values between ranks, over an injected exchange; a checkpoint that is committed beside
them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.thread_ranks import run_ranks
from zero_trial.errors import CheckpointError
from zero_trial.trial.runtime.protocols import Distributed, OpenCheckpoint


def test_alone_every_collective_answers_at_once() -> None:
    ranks = Distributed()
    assert ranks.allgather({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert ranks.gather(3) == [3]
    assert ranks.broadcast("x") == "x"
    ranks.barrier()


def test_three_ranks_in_order() -> None:
    def work(ranks: Distributed) -> list[object]:
        return [ranks.allgather(ranks.rank), ranks.gather(ranks.rank * 10), ranks.broadcast(f"from {ranks.rank}")]

    assert run_ranks(3, work) == [
        [[0, 1, 2], [0, 10, 20], "from 0"],
        [[0, 1, 2], None, "from 0"],
        [[0, 1, 2], None, "from 0"],
    ]


def test_a_commit_is_known_to_all_ranks_at_once() -> None:
    let_go = threading.Event()

    def work(ranks: Distributed) -> list[bool]:
        def commit() -> None:
            assert let_go.wait(30)

        opened = OpenCheckpoint(ranks, Path("x"), "x", commit, remove=pytest.fail)
        opened.begin_commit()
        found = [opened.committed(wait=False), opened.committed(wait=False)]
        let_go.set()
        return [*found, opened.committed(wait=True)]

    assert run_ranks(3, work) == [[False, False, True]] * 3


def test_a_commit_that_fails_is_raised_by_all_ranks() -> None:
    def work(ranks: Distributed) -> None:
        def commit() -> None:
            assert ranks.rank == 0
            raise ConnectionError("no one there")

        opened = OpenCheckpoint(ranks, Path("step"), "x", commit, remove=pytest.fail)
        opened.begin_commit()
        opened.committed(wait=True)

    outcomes = run_ranks(3, work)
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 3
    assert all("ConnectionError: no one there" in str(outcome) for outcome in outcomes)


def test_a_checkpoint_that_is_given_up_is_removed_or_its_commit_interrupted() -> None:
    interrupted, done = threading.Event(), []
    before = OpenCheckpoint(Distributed(), Path("x"), "x", pytest.fail, lambda: done.append("removed"))
    before.abandon()

    def commit() -> None:
        assert interrupted.wait(30)
        done.append("ended")

    during = OpenCheckpoint(Distributed(), Path("x"), "x", commit, pytest.fail, interrupted.set)
    during.begin_commit()
    during.abandon()
    assert done == ["removed", "ended"]
