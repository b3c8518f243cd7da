"""Trials and their allocations in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from zero_trial.master.logs import EXCLUDE_NODE, LogMatch, LogPolicy
from zero_trial.master.records import Allocation, Trial, existing
from zero_trial.master.store import experiment_rows, metric_rows
from zero_trial.master.store.database import insert, loads, record, update

_GIVEN = (
    *("experiment_id", "request_id", "task_id", "state", "hparams", "seed", "created"),
    *("warm_start_checkpoint", "latest_checkpoint", "external_id", "last_activity"),
)

_LIVE = "state NOT IN ('COMPLETED', 'CANCELED', 'ERROR')"


def add(connection: sqlite3.Connection, trial: Trial) -> int:
    """Insert a trial and return its new id (``trial.id`` is ignored)."""
    return insert(connection, "trials", {name: getattr(trial, name) for name in _GIVEN})


def get(connection: sqlite3.Connection, number: int, *, derived: bool = False, summary: bool = True) -> Trial | None:
    """Return one trial. ``derived``: with validations, checkpoints and (by default) summary."""
    row = connection.execute("SELECT * FROM trials WHERE id = ?", (number,)).fetchone()
    if row is None or not derived:
        return None if row is None else record(Trial, row)
    more = _derived(connection, [row], _smaller(connection, row["experiment_id"]), "= ?", number)[0]
    return record(Trial, row, **more, summary_metrics=metric_rows.summary(connection, number) if summary else {})


def of_task(connection: sqlite3.Connection, task_id: str) -> Trial | None:
    """Return the trial of a task."""
    return _one(connection, "task_id = ?1 OR id IN (SELECT trial_id FROM allocations WHERE task_id = ?1)", task_id)


def task_ids(connection: sqlite3.Connection, trial: Trial) -> tuple[str, ...]:
    """Return the tasks of a trial, oldest first: tasks that had runs, and the current task."""
    rows = connection.execute("SELECT task_id FROM allocations WHERE trial_id = ? ORDER BY run_id", (trial.id,))
    return tuple(dict.fromkeys([*(row[0] for row in rows), trial.task_id]))


def run_of_trial(connection: sqlite3.Connection, trial_id: int, run_id: int) -> Allocation | None:
    """Return one run of a trial."""
    return next(iter(_allocations(connection, "trial_id = ? AND run_id = ?", trial_id, run_id)), None)


def of_request(connection: sqlite3.Connection, experiment_id: int, request_id: str) -> Trial | None:
    """Return the trial with this request id from the searcher."""
    return _one(connection, "experiment_id = ? AND request_id = ?", experiment_id, request_id)


def of_external_id(connection: sqlite3.Connection, experiment_id: int, external_id: str) -> Trial | None:
    """Return the unmanaged trial with this external id."""
    return _one(connection, "experiment_id = ? AND external_id = ?", experiment_id, external_id)


def silent(connection: sqlite3.Connection, since: float) -> list[Trial]:
    """List the active unmanaged trials that have sent nothing since ``since``."""
    return _listed(connection, "last_activity IS NOT NULL AND last_activity < ? AND state = 'ACTIVE'", since)


def of_experiment(connection: sqlite3.Connection, experiment_id: int, *, derived: bool = False) -> list[Trial]:
    """List all trials, oldest first. ``derived``: as in `get`, but without the summary."""
    if not derived:
        return _listed(connection, "experiment_id = ? ORDER BY id", experiment_id)
    rows = connection.execute("SELECT * FROM trials WHERE experiment_id = ? ORDER BY id", (experiment_id,)).fetchall()
    which = "IN (SELECT id FROM trials WHERE experiment_id = ?)"
    more = _derived(connection, rows, _smaller(connection, experiment_id), which, experiment_id)
    return [record(Trial, row, **each) for row, each in zip(rows, more, strict=True)]


def live(connection: sqlite3.Connection, experiment_id: int) -> list[Trial]:
    """List the trials that have not ended."""
    return _listed(connection, f"experiment_id = ? AND {_LIVE} ORDER BY id", experiment_id)


def progress_of_live(connection: sqlite3.Connection, experiment_id: int) -> dict[str, float]:
    """Return the progress of the trials that have not ended, by request id."""
    rows = connection.execute(
        f"SELECT request_id, coalesce(progress, 0.0) FROM trials WHERE experiment_id = ? AND {_LIVE} ORDER BY id",
        (experiment_id,),
    )
    return {row[0]: row[1] for row in rows}


def change(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns."""
    update(connection, "trials", "id", number, columns)


def early_exit(connection: sqlite3.Connection, number: int) -> str:
    """Return the reason for the early exit that the trial reported; "" if it reported none."""
    row = connection.execute("SELECT early_exit FROM trials WHERE id = ?", (number,)).fetchone()
    return str(row[0]) if row else ""


def reached(connection: sqlite3.Connection, number: int) -> tuple[int, int, bool] | None:
    """Return a trial's newest run id, its steps completed, and whether it is unmanaged."""
    row = connection.execute(
        "SELECT run_id, steps_completed, last_activity IS NOT NULL FROM trials WHERE id = ?", (number,)
    ).fetchone()
    return None if row is None else (row[0], row[1], bool(row[2]))


def metadata(connection: sqlite3.Connection, number: int) -> dict[str, Any]:
    """Return the metadata that a trial set with ``train.set_metadata``. Raises NotFound."""
    row = connection.execute("SELECT metadata FROM trials WHERE id = ?", (number,)).fetchone()
    return dict(loads(existing(row, f"trial {number}")[0]))


def add_allocation(connection: sqlite3.Connection, allocation: Allocation) -> None:
    """Insert a queued allocation."""
    names = ("id", "trial_id", "experiment_id", "task_id", "run_id", "state", "created", "resources_id", "container_id")
    insert(connection, "allocations", {name: getattr(allocation, name) for name in names})


def allocation(connection: sqlite3.Connection, name: str) -> Allocation | None:
    """Return one allocation."""
    return next(iter(_allocations(connection, "id = ?", name)), None)


def newest_allocation(connection: sqlite3.Connection, trial_id: int) -> Allocation | None:
    """Return the latest run of a trial."""
    return next(iter(_allocations(connection, "trial_id = ? ORDER BY run_id DESC LIMIT 1", trial_id)), None)


def allocations(connection: sqlite3.Connection, *, trial_id: int | None = None) -> list[Allocation]:
    """List all runs of a trial; by default, all allocations that have not ended, oldest first."""
    if trial_id is None:
        return _allocations(connection, "state != 'TERMINATED' ORDER BY created, rowid")
    return _allocations(connection, "trial_id = ? ORDER BY run_id", trial_id)


def overdue(connection: sqlite3.Connection, now: float) -> list[Allocation]:
    """List the allocations that are past their deadline."""
    return _allocations(connection, "state != 'TERMINATED' AND deadline <= ? ORDER BY created, rowid", now)


def killing(connection: sqlite3.Connection, name: str) -> bool:
    """Return whether the master is killing this allocation."""
    row = connection.execute("SELECT killing FROM allocations WHERE id = ?", (name,)).fetchone()
    return bool(row and row[0])


def change_allocation(connection: sqlite3.Connection, name: str, **columns: Any) -> None:
    """Set columns."""
    update(connection, "allocations", "id", name, columns)


def add_log_match(connection: sqlite3.Connection, task_id: str, match: LogMatch) -> bool:
    """Insert the first match of a policy in a task; return False if there was one already."""
    policy = match.policy
    values = (task_id, policy.pattern, policy.action, policy.name, match.line)
    return connection.execute("INSERT OR IGNORE INTO log_matches VALUES (?, ?, ?, ?, ?)", values).rowcount == 1


def log_matches(connection: sqlite3.Connection, task_id: str) -> list[LogMatch]:
    """List the matches of log policies in a task, oldest first."""
    rows = connection.execute("SELECT * FROM log_matches WHERE task_id = ? ORDER BY rowid", (task_id,))
    return [LogMatch(LogPolicy(row["pattern"], row["action"], row["name"]), row["line"]) for row in rows.fetchall()]


def excluded_tasks(connection: sqlite3.Connection) -> set[str]:
    """Return the tasks that a log policy excluded from this machine."""
    rows = connection.execute("SELECT task_id FROM log_matches WHERE action = ?", (EXCLUDE_NODE,))
    return {row[0] for row in rows}


def _smaller(connection: sqlite3.Connection, experiment_id: int) -> bool:
    return experiment_rows.smaller_is_better(experiment_rows.config(connection, experiment_id) or {})


def _listed(connection: sqlite3.Connection, which: str, *values: object) -> list[Trial]:
    """List trials without derived fields. ``which``: the SQL after WHERE."""
    return [record(Trial, row) for row in connection.execute(f"SELECT * FROM trials WHERE {which}", values).fetchall()]


def _one(connection: sqlite3.Connection, which: str, *values: object) -> Trial | None:
    return next(iter(_listed(connection, which, *values)), None)


def _derived(
    connection: sqlite3.Connection, rows: Sequence[sqlite3.Row], smaller: bool, which: str, value: int
) -> list[dict[str, Any]]:
    """Return each row's fields that are derived from other tables, except the summary.

    Args:
        which: SQL condition for the trials of ``rows``, after ``trial_id``; parameter: ``value``.
    """
    best = metric_rows.best_validations(connection, which, value, smaller_is_better=smaller)
    newest = metric_rows.latest_validations(connection, which, value)
    saved = {
        row[0]: (row[1], row[2])
        for row in connection.execute(
            "SELECT trial_id, count(*), coalesce(sum(size), 0) FROM checkpoints "
            f"WHERE trial_id {which} AND state != 'DELETED' GROUP BY trial_id",
            (value,),
        )
    }
    runs: dict[int, list[sqlite3.Row]] = {}
    for run in connection.execute(
        f"SELECT trial_id, task_id, state, started, ended FROM allocations WHERE trial_id {which} ORDER BY trial_id, run_id",
        (value,),
    ):
        runs.setdefault(run[0], []).append(run)
    found = []
    for row in rows:
        own = runs.get(row["id"], [])
        record_of_best, metric = best.get(row["id"], (None, None))
        count, size = saved.get(row["id"], (0, 0))
        found.append(
            {
                "task_ids": tuple(dict.fromkeys([*(run["task_id"] for run in own), row["task_id"]])),
                "latest_validation": newest.get(row["id"]),
                "best_validation": record_of_best,
                "searcher_metric": metric,
                "checkpoint_count": count,
                "checkpoint_size": size,
                "wall_clock": sum(run["ended"] - run["started"] for run in own if run["ended"] and run["started"]),
                "shown_state": experiment_rows.furthest(
                    row["state"], {run["state"] for run in own}, unmanaged=row["last_activity"] is not None
                ),
            }
        )
    return found


def _allocations(connection: sqlite3.Connection, which: str, *values: object) -> list[Allocation]:
    """List allocations. ``which``: the SQL after WHERE."""
    rows = connection.execute(f"SELECT * FROM allocations WHERE {which}", values).fetchall()
    return [record(Allocation, row) for row in rows]
