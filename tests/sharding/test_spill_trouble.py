"""Tests for zero_trial/sharding/offload/swap_file.py."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from zero_trial.errors import StorageError
from zero_trial.sharding.offload.swap_file import DiskFailure, DiskTransfer


def ticket(fault: OSError | None = None) -> DiskTransfer:
    future: Future[None] = Future()
    if fault is None:
        future.set_result(None)
    else:
        future.set_exception(fault)
    return DiskTransfer("/disk", [future])


def test_the_first_failure_is_remembered() -> None:
    trouble = DiskFailure()
    trouble.wait([ticket(), ticket()])
    trouble.require_none()
    with pytest.raises(StorageError, match="/disk: offloaded state could not be read or written: got one"):
        trouble.wait([ticket(), ticket(OSError("one")), ticket(OSError("two"))])
    with pytest.raises(StorageError):
        trouble.wait([ticket(OSError("three"))])
    for _ in range(2):
        with pytest.raises(StorageError) as error:
            trouble.require_none()
        assert str(error.value).startswith("/disk: the disk has failed, and offloaded state is lost: got one")
        assert "go on from the last checkpoint in a new engine" in str(error.value)


def test_all_are_waited_for() -> None:
    """Also those behind one that failed: their memory is free afterwards."""
    last = ticket()
    with pytest.raises(StorageError):
        DiskFailure().wait([ticket(OSError("one")), last])
    assert last._futures == []
