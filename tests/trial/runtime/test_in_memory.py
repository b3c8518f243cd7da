"""Threads as ranks, and a record of everything that was reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.storing import storing
from tests.support.thread_ranks import run_ranks
from zero_trial.errors import CheckpointError, MeshError
from zero_trial.trial.runtime.local import InMemoryPlatform, ReportedRecord
from zero_trial.trial.runtime.protocols import Distributed, Platform


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(ranks: Distributed) -> None:
        if ranks.rank == 1:
            raise ValueError("mine")
        ranks.barrier()

    first, second = run_ranks(2, work)
    assert isinstance(first, MeshError) and isinstance(second, ValueError)


def test_the_record_is_shared_and_checkpoints_are_noted_once(tmp_path: Path) -> None:
    record = ReportedRecord()

    def work(ranks: Distributed) -> None:
        platform: Platform = InMemoryPlatform(distributed=ranks, record=record, storage=tmp_path)
        with storing(platform.checkpoints, {"steps_completed": 3}) as opened:
            (opened.path / str(ranks.rank)).touch()
        platform.report_early_exit("INVALID_HP")

    run_ranks(2, work)
    assert record.checkpoints == ["step-000003"]
    assert record.early_exits == ["INVALID_HP"]


def test_preemption_from_the_second_poll_on() -> None:
    platform = InMemoryPlatform(record=ReportedRecord(preempt_from_poll=2))
    assert [platform.should_preempt() for _ in range(3)] == [False, True, True]


def test_ranks_need_a_storage_in_common() -> None:
    errors = run_ranks(2, lambda ranks: InMemoryPlatform(distributed=ranks))
    assert all(isinstance(error, CheckpointError) for error in errors)


def test_the_best_validation_by_the_searcher() -> None:
    platform = InMemoryPlatform(experiment={"searcher": {"metric": "loss"}})
    assert platform.best_validation() is None
    for value in (2.0, 1.0, 3.0):
        platform.report_validation_metrics(1, {"loss": value})
    with pytest.raises(IndexError):
        platform.record.training[0]
    assert platform.best_validation() == 1.0
