"""Tests for zero_trial/sharding/offload/swap_file.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zero_trial.errors import StorageError
from zero_trial.sharding.offload.swap_file import DiskFailure, MappedAccess


class Log:
    """An opening that writes down what it is asked for; ``fails`` at the end of the mapping."""

    def __init__(self, *, fails: bool = False) -> None:
        self.said: list[str] = []
        self.trouble = DiskFailure()
        self.fails = fails
        self.opening = MappedAccess(
            self.mapped,
            self.trouble,
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
    with log.opening(), log.opening():
        assert log.opening.is_open
        assert log.said == ["before", "map", "open 8"]
    assert log.said == ["before", "map", "open 8", "shut", "unmap"] and not log.opening.is_open
    with log.opening():
        pass
    assert log.said.count("map") == 2


def test_it_shuts_when_the_block_raises() -> None:
    log = Log()
    with pytest.raises(KeyError), log.opening():
        raise KeyError
    assert log.said[-1] == "shut" and not log.opening.is_open
    log.trouble.require_none()


def test_edits_that_may_be_lost_are_trouble() -> None:
    log = Log(fails=True)
    with pytest.raises(StorageError, match="full"), log.opening():
        pass
    with pytest.raises(StorageError, match="is lost"), log.opening():
        log.said.append("never")
    assert "never" not in log.said and not log.opening.is_open


def test_a_fault_before_anything_was_edited_is_none() -> None:
    log = Log()
    log.opening._before = lambda: (_ for _ in ()).throw(StorageError("soon"))  # type: ignore[assignment]
    with pytest.raises(StorageError, match="soon"), log.opening():
        pass
    log.trouble.require_none()
