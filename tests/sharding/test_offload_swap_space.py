"""Tests for zero_trial/sharding/offload/swap_space.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zero_trial.errors import StorageError
from zero_trial.sharding.offload.swap_space import CUT, MOST, DiskFailure, MappedAccess, buffer_elements


@pytest.mark.parametrize(
    ("total", "sub_group", "count", "elements"),
    [
        (1 << 30, 10**9, 4, MOST),
        (1 << 30, 100_000, 4, 24 * CUT),
        (1 << 20, 10**9, 2, 1 << 17),
        (1 << 20, 10**9, 4, 1 << 16),
        (1000, 10**9, 4, CUT),
        (1000, 1, 1, CUT),
    ],
)
def test_buffers_hold_a_quarter_at_most(total: int, sub_group: int, count: int, elements: int) -> None:
    assert buffer_elements(total, sub_group, count) == elements


def test_another_limit() -> None:
    """Parameters have buffers for whole shards."""
    assert buffer_elements(1 << 30, 6 * MOST, 4, 6 * MOST) == 6 * MOST
    assert buffer_elements(24 * MOST, 6 * MOST, 4, 6 * MOST) == 24 * MOST // 16


class Log:
    """An access that writes down what it is asked for; ``fails`` at the end of the mapping."""

    def __init__(self, *, fails: bool = False) -> None:
        self.said: list[str] = []
        self.failure = DiskFailure()
        self.fails = fails
        self.access = MappedAccess(
            self.mapped,
            self.failure,
            lambda: self.said.append("before"),
            lambda area: self.said.append(f"open {0 if area is None else area.numel()}"),
            lambda area: self.said.append("shut"),
        )

    @contextmanager
    def mapped(self) -> Iterator[torch.Tensor]:
        self.said.append("map")
        yield torch.zeros(8, dtype=torch.uint8)
        self.said.append("unmap")
        if self.fails:
            raise StorageError("full")


def test_nested_ones_share_the_outermost() -> None:
    log = Log()
    with log.access(), log.access():
        assert log.access.is_open
        assert log.said == ["before", "map", "open 8"]
    assert log.said == ["before", "map", "open 8", "shut", "unmap"] and not log.access.is_open
    with log.access():
        pass
    assert log.said.count("map") == 2


def test_it_shuts_when_the_block_raises() -> None:
    log = Log()
    with pytest.raises(KeyError), log.access():
        raise KeyError
    assert log.said[-1] == "shut" and not log.access.is_open
    log.failure.require_none()


def test_edits_that_may_be_lost_are_trouble() -> None:
    log = Log(fails=True)
    with pytest.raises(StorageError, match="full"), log.access():
        pass
    with pytest.raises(StorageError, match="is lost"), log.access():
        log.said.append("never")
    assert "never" not in log.said and not log.access.is_open


def test_a_fault_before_anything_was_edited_is_none() -> None:
    log = Log()
    log.access._drain = lambda: (_ for _ in ()).throw(StorageError("soon"))  # type: ignore[assignment]
    with pytest.raises(StorageError, match="soon"), log.access():
        pass
    log.failure.require_none()


class Transfer:
    """A transfer that is over."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self.waited = False

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self.waited = True
        if self.fault is not None:
            raise StorageError("could not be written", where="/disk", got=self.fault)


def test_the_first_failure_is_remembered() -> None:
    failure = DiskFailure()
    failure.wait([Transfer(), Transfer()])
    failure.require_none()
    with pytest.raises(StorageError, match="/disk: could not be written: got one"):
        failure.wait([Transfer(), Transfer("one"), Transfer("two")])
    with pytest.raises(StorageError):
        failure.wait([Transfer("three")])
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            failure.require_none()
        assert str(error.value).startswith("/disk: the disk has failed, and offloaded state is lost: got one")
        assert "go on from the last checkpoint in a new engine" in str(error.value)


def test_all_are_waited_for() -> None:
    """Also those behind one that failed: their memory is free afterwards."""
    last = Transfer()
    with pytest.raises(StorageError):
        DiskFailure().wait([Transfer("one"), last])
    assert last.waited
