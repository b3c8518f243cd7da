"""An agreed early end: who tells, who leaves, and who is left alone."""

from __future__ import annotations

import threading

import pytest

from tests.support.pool import Pools
from zero_trial.comm import rendezvous as module
from zero_trial.comm.rendezvous import ExitNotice, open_exit_notice

PATIENCE = 30.0


class FakeStore:
    """The three calls of a torch store that are used."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.gone = False
        self.lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            if self.gone:
                raise RuntimeError("Connection reset by peer")
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)


def test_the_first_of_all_ranks_has_the_claim() -> None:
    store = FakeStore()
    first, second = ExitNotice(store), ExitNotice(store)
    assert not first.claimed("early exit")
    assert [second.claim("early exit"), first.claim("early exit"), second.claim("early exit")] == [True, False, False]
    assert first.claimed("early exit") and not first.claimed("another")


def test_a_world_of_one_and_a_store_that_is_gone_leave_it_to_each() -> None:
    alone = ExitNotice()
    assert [alone.claim("x"), alone.claim("x"), alone.claimed("x"), alone.claimed("y")] == [True, False, True, False]
    store = FakeStore()
    store.gone = True
    assert ExitNotice(store).claim("x") and not ExitNotice(store).claimed("x")


@pytest.fixture()
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.02)


@pytest.mark.usefixtures("hasty")
def test_a_rank_leaves_soon_after_another_has_claimed() -> None:
    store, left = FakeStore(), threading.Event()
    watching = ExitNotice(store)
    watching.watch("early exit", left.set)
    assert not left.is_set()
    ExitNotice(store).claim("early exit")
    assert left.wait(PATIENCE)
    watching.close()


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_claims_itself_or_has_stopped_watching_is_left_alone() -> None:
    store, left = FakeStore(), threading.Event()
    own, closed = ExitNotice(store), ExitNotice(store)
    own.watch("early exit", left.set)
    closed.watch("early exit", left.set)
    closed.close()
    own.claim("early exit")
    own.close()
    assert not left.is_set()


def test_without_a_store_nothing_watches() -> None:
    alone = ExitNotice()
    alone.watch("x", pytest.fail)
    alone.close()


def claim_together() -> bool:
    return open_exit_notice().claim("test_farewell")


def test_real_ranks_agree_on_one(ranks: Pools) -> None:
    assert sorted(ranks(2).run(claim_together)) == [False, True]
