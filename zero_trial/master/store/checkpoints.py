"""Checkpoints in the store; their files lie in the experiment's checkpoint storage."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from zero_trial.master.records import Checkpoint, CheckpointState
from zero_trial.master.store import metrics
from zero_trial.master.store.database import dumps, loads, update


def put(connection: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    """Insert, or replace one of the same UUID (the harness may say it twice)."""
    connection.execute(
        "INSERT OR REPLACE INTO checkpoints "
        "(uuid, state, trial_id, experiment_id, task_id, allocation_id, reported, metadata, resources, size, steps, storage_id) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            checkpoint.uuid,
            checkpoint.state.value,
            checkpoint.trial_id,
            checkpoint.experiment_id,
            checkpoint.task_id,
            checkpoint.allocation_id,
            checkpoint.reported,
            dumps(checkpoint.metadata),
            dumps(checkpoint.resources),
            checkpoint.size,
            checkpoint.steps_completed,
            checkpoint.storage_id,
        ),
    )


def get(connection: sqlite3.Connection, uuid: str, *, derived: bool = True) -> Checkpoint | None:
    """One checkpoint; ``derived`` adds its trial's hyperparameters, config and the validation at its step."""
    row = connection.execute("SELECT * FROM checkpoints WHERE uuid = ?", (uuid,)).fetchone()
    return None if row is None else _record(connection, row, derived)


def of_trial(connection: sqlite3.Connection, trial_id: int) -> list[Checkpoint]:
    """By steps, then as they came."""
    rows = connection.execute(
        "SELECT * FROM checkpoints WHERE trial_id = ? ORDER BY steps, reported, rowid", (trial_id,)
    )
    return [_record(connection, row, True) for row in rows.fetchall()]


def of_experiment(connection: sqlite3.Connection, experiment_id: int) -> list[Checkpoint]:
    """As they came."""
    rows = connection.execute(
        "SELECT * FROM checkpoints WHERE experiment_id = ? ORDER BY reported, rowid", (experiment_id,)
    )
    return [_record(connection, row, True) for row in rows.fetchall()]


def latest(connection: sqlite3.Connection, trial_id: int) -> Checkpoint | None:
    """The newest that can be restored."""
    row = connection.execute(
        "SELECT * FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED' AND doomed = 0 ORDER BY reported DESC, rowid DESC LIMIT 1",
        (trial_id,),
    ).fetchone()
    return None if row is None else _record(connection, row, False)


def change(connection: sqlite3.Connection, uuid: str, **columns: Any) -> None:
    """Set columns."""
    update(connection, "checkpoints", "uuid", uuid, columns)


def mark_deleted(connection: sqlite3.Connection, uuids: Iterable[str]) -> None:
    """Mark what is to be deleted on disk; it stays marked until that is done."""
    connection.executemany(
        "UPDATE checkpoints SET doomed = 1 WHERE uuid = ? AND state NOT IN ('DELETED')", [(uuid,) for uuid in uuids]
    )


def marked_deleted(connection: sqlite3.Connection) -> list[Checkpoint]:
    """Those marked."""
    rows = connection.execute("SELECT * FROM checkpoints WHERE doomed = 1 ORDER BY reported, rowid")
    return [_record(connection, row, True) for row in rows.fetchall()]


def _record(connection: sqlite3.Connection, row: sqlite3.Row, derived: bool) -> Checkpoint:
    more = _derived(connection, row) if derived and row["trial_id"] is not None else {}
    return Checkpoint(
        uuid=row["uuid"],
        state=CheckpointState(row["state"]),
        trial_id=row["trial_id"],
        experiment_id=row["experiment_id"],
        task_id=row["task_id"],
        allocation_id=row["allocation_id"],
        reported=row["reported"],
        metadata=loads(row["metadata"]),
        resources=loads(row["resources"]),
        size=row["size"],
        steps_completed=row["steps"],
        storage_id=row["storage_id"],
        **more,
    )


def _derived(connection: sqlite3.Connection, row: sqlite3.Row) -> Mapping[str, Any]:
    trial = connection.execute(
        "SELECT t.hparams, e.config FROM trials t JOIN experiments e ON e.id = t.experiment_id WHERE t.id = ?",
        (row["trial_id"],),
    ).fetchone()
    if trial is None:
        return {}
    validation = metrics.validation_at(connection, row["trial_id"], row["steps"])
    return {
        "hparams": loads(trial["hparams"]),
        "experiment_config": loads(trial["config"]),
        "validation_metrics": validation[0].metrics if validation else {},
        "searcher_metric": validation[1] if validation else None,
    }
