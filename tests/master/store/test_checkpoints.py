"""Checkpoints in the store."""

from __future__ import annotations

from pathlib import Path

from tests.master.store.test_experiments import put, put_trial
from zero_trial.master.records import Checkpoint, CheckpointState
from zero_trial.master.store import Database, checkpoints


def saved(name: str, trial_id: int, steps: int, at: float) -> Checkpoint:
    return Checkpoint(
        name, CheckpointState.COMPLETED, trial_id, 1, "t", "t.1", at, {"steps_completed": steps}, {"w": 3}, 3, steps
    )


def test_checkpoints(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        experiment = put(connection)
        trial = put_trial(connection, experiment, "a", 0.5)
        for name, steps, at in (("one", 1, 1.0), ("two", 2, 2.0), ("late", 1, 3.0)):
            checkpoints.put(connection, saved(name, trial, steps, at))
        checkpoints.put(connection, saved("two", trial, 2, 2.0))  # said twice
        assert [item.uuid for item in checkpoints.of_trial(connection, trial)] == ["one", "late", "two"]
        assert [item.uuid for item in checkpoints.of_experiment(connection, experiment)] == ["one", "two", "late"]
        newest = checkpoints.latest(connection, trial)
        assert newest is not None and newest.uuid == "late"  # a run that went back wrote it last
        found = checkpoints.get(connection, "one")
        assert found is not None and found.searcher_metric == 0.5 and found.validation_metrics == {"val": 0.5}
        checkpoints.mark_deleted(connection, ["late", "nobody"])
        assert [item.uuid for item in checkpoints.marked_deleted(connection)] == ["late"]
        newest = checkpoints.latest(connection, trial)
        assert newest is not None and newest.uuid == "two"
        checkpoints.change(connection, "late", state=CheckpointState.DELETED, doomed=0)
        checkpoints.mark_deleted(connection, ["late"])
        assert checkpoints.marked_deleted(connection) == []
        assert checkpoints.get(connection, "nobody") is None
    database.close()
