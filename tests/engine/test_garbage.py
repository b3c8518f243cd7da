"""The cycle collector's pause."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from zero_trial.engine.observe import CollectorPause


class Owner:
    pass


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


def test_off_until_the_last_owner_has_released_it():
    pause, first, second = CollectorPause(), Owner(), Owner()
    pause.hold(first)
    pause.hold(second)
    pause.hold(second)
    assert not gc.isenabled()
    pause.release(second)
    assert not gc.isenabled()
    pause.release(first)
    pause.release(first)
    assert gc.isenabled()


def test_an_owner_that_is_gone_asks_for_nothing():
    pause, owner = CollectorPause(), Owner()
    pause.hold(owner)
    del owner
    assert gc.isenabled()


def test_off_before_stays_off():
    pause, owner = CollectorPause(), Owner()
    gc.disable()
    pause.hold(owner)
    pause.release(owner)
    assert not gc.isenabled()
