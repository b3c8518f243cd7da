"""Trials and their allocations in the store."""

from __future__ import annotations

import sqlite3
from typing import Any

from zero_trial.master.log_policies import EXCLUDE_NODE, LogMatch, LogPolicy
from zero_trial.master.records import Allocation, AllocationState, Trial, TrialState
from zero_trial.master.store import experiments, metrics
from zero_trial.master.store.database import insert, loads, record, update

_GIVEN = (
    *("experiment_id", "request_id", "task_id", "state", "hparams", "seed", "created"),
    *("warm_start_checkpoint", "latest_checkpoint", "external_id", "last_activity"),
)


def add(connection: sqlite3.Connection, trial: Trial) -> int:
    """Insert a trial and return its new id (``trial.id`` is ignored)."""
    return insert(connection, "trials", {name: getattr(trial, name) for name in _GIVEN})


def get(connection: sqlite3.Connection, number: int, *, derived: bool = False, summary: bool = True) -> Trial | None:
    """Return one trial; ``derived``: with validations, checkpoints and (if wanted) summary."""
    row = connection.execute("SELECT * FROM trials WHERE id = ?", (number,)).fetchone()
    if row is None:
        return None
    if not derived:
        return _record(row, {})
    return _record(row, _derived(connection, row, _smaller(connection, row["experiment_id"]), summary=summary))


def of_task(connection: sqlite3.Connection, task_id: str) -> Trial | None:
    """Return the trial that a task runs."""
    row = connection.execute(
        "SELECT * FROM trials WHERE task_id = ?1 OR id IN (SELECT trial_id FROM allocations WHERE task_id = ?1)",
        (task_id,),
    ).fetchone()
    return None if row is None else _record(row, {})


def task_ids(connection: sqlite3.Connection, trial: Trial) -> tuple[str, ...]:
    """Return the tasks of a trial, oldest first: those that had runs, and the present one."""
    rows = connection.execute("SELECT task_id FROM allocations WHERE trial_id = ? ORDER BY run_id", (trial.id,))
    return tuple(dict.fromkeys([*(row[0] for row in rows), trial.task_id]))


def run_of_trial(connection: sqlite3.Connection, trial_id: int, run_id: int) -> Allocation | None:
    """Return one run of a trial."""
    row = connection.execute(
        "SELECT * FROM allocations WHERE trial_id = ? AND run_id = ?", (trial_id, run_id)
    ).fetchone()
    return None if row is None else _allocation(row)


def of_request(connection: sqlite3.Connection, experiment_id: int, request_id: str) -> Trial | None:
    """Return the trial with this request id of the searcher."""
    row = connection.execute(
        "SELECT * FROM trials WHERE experiment_id = ? AND request_id = ?", (experiment_id, request_id)
    ).fetchone()
    return None if row is None else _record(row, {})


def of_external_id(connection: sqlite3.Connection, experiment_id: int, external_id: str) -> Trial | None:
    """Return the unmanaged trial of this name."""
    row = connection.execute(
        "SELECT * FROM trials WHERE experiment_id = ? AND external_id = ?", (experiment_id, external_id)
    ).fetchone()
    return None if row is None else _record(row, {})


def silent(connection: sqlite3.Connection, since: float) -> list[Trial]:
    """List the unmanaged trials that are active and have sent nothing after ``since``."""
    rows = connection.execute(
        "SELECT * FROM trials WHERE last_activity IS NOT NULL AND last_activity < ? AND state = 'ACTIVE'", (since,)
    )
    return [_record(row, {}) for row in rows.fetchall()]


def of_experiment(connection: sqlite3.Connection, experiment_id: int, *, derived: bool = False) -> list[Trial]:
    """List all trials, oldest first; ``derived`` as for one, without the summary."""
    rows = connection.execute("SELECT * FROM trials WHERE experiment_id = ? ORDER BY id", (experiment_id,)).fetchall()
    if not derived:
        return [_record(row, {}) for row in rows]
    smaller = _smaller(connection, experiment_id)
    return [_record(row, _derived(connection, row, smaller, summary=False)) for row in rows]


def of_project(connection: sqlite3.Connection, project_id: int | None) -> list[Trial]:
    """List the trials of the experiments of a project (None: of all), oldest first."""
    rows = connection.execute(
        "SELECT t.* FROM trials t JOIN experiments e ON e.id = t.experiment_id "
        "WHERE ?1 IS NULL OR e.project_id = ?1 ORDER BY t.id",
        (project_id,),
    )
    return [_record(row, {}) for row in rows.fetchall()]


def live(connection: sqlite3.Connection, experiment_id: int) -> list[Trial]:
    """List the trials that have not ended."""
    rows = connection.execute(
        "SELECT * FROM trials WHERE experiment_id = ? AND state NOT IN ('COMPLETED', 'CANCELED', 'ERROR') ORDER BY id",
        (experiment_id,),
    )
    return [_record(row, {}) for row in rows.fetchall()]


def erase(connection: sqlite3.Connection, number: int) -> None:
    """Delete a trial with its reports and runs; its checkpoints stay with the experiment."""
    runs = "SELECT id FROM allocations WHERE trial_id = ?"
    tasks = "SELECT task_id FROM allocations WHERE trial_id = ?"
    connection.execute(f"DELETE FROM tokens WHERE allocation_id IN ({runs})", (number,))
    connection.execute(f"DELETE FROM log_matches WHERE task_id IN ({tasks})", (number,))
    for table, column in (("metrics", "trial_id"), ("allocations", "trial_id"), ("trials", "id")):
        connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))


def change(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns."""
    update(connection, "trials", "id", number, columns)


def early_exit(connection: sqlite3.Connection, number: int) -> str:
    """Return why the trial has announced its end; "" if it has not."""
    row = connection.execute("SELECT early_exit FROM trials WHERE id = ?", (number,)).fetchone()
    return str(row[0]) if row else ""


def metadata(connection: sqlite3.Connection, number: int) -> Any:
    """Return the metadata that the trial has set."""
    row = connection.execute("SELECT metadata FROM trials WHERE id = ?", (number,)).fetchone()
    return loads(row[0]) if row else {}


def add_allocation(connection: sqlite3.Connection, allocation: Allocation) -> None:
    """Insert a queued allocation."""
    names = ("id", "trial_id", "experiment_id", "task_id", "run_id", "state", "created", "resources_id", "container_id")
    insert(connection, "allocations", {name: getattr(allocation, name) for name in names})


def allocation(connection: sqlite3.Connection, name: str) -> Allocation | None:
    """Return one allocation."""
    row = connection.execute("SELECT * FROM allocations WHERE id = ?", (name,)).fetchone()
    return None if row is None else _allocation(row)


def newest_allocation(connection: sqlite3.Connection, trial_id: int) -> Allocation | None:
    """Return the latest run of a trial."""
    row = connection.execute(
        "SELECT * FROM allocations WHERE trial_id = ? ORDER BY run_id DESC LIMIT 1", (trial_id,)
    ).fetchone()
    return None if row is None else _allocation(row)


def allocations(connection: sqlite3.Connection, *, trial_id: int | None = None) -> list[Allocation]:
    """List all runs of a trial; without one, all allocations that have not ended, oldest first."""
    if trial_id is None:
        rows = connection.execute("SELECT * FROM allocations WHERE state != 'TERMINATED' ORDER BY created, rowid")
    else:
        rows = connection.execute("SELECT * FROM allocations WHERE trial_id = ? ORDER BY run_id", (trial_id,))
    return [_allocation(row) for row in rows.fetchall()]


def overdue(connection: sqlite3.Connection, now: float) -> list[Allocation]:
    """List the allocations that should have ended by now."""
    rows = connection.execute(
        "SELECT * FROM allocations WHERE state != 'TERMINATED' AND deadline <= ? ORDER BY created, rowid", (now,)
    )
    return [_allocation(row) for row in rows.fetchall()]


def killing(connection: sqlite3.Connection, name: str) -> bool:
    """Return whether the master is killing this allocation."""
    row = connection.execute("SELECT killing FROM allocations WHERE id = ?", (name,)).fetchone()
    return bool(row and row[0])


def change_allocation(connection: sqlite3.Connection, name: str, **columns: Any) -> None:
    """Set columns."""
    update(connection, "allocations", "id", name, columns)


def add_log_match(connection: sqlite3.Connection, task_id: str, match: LogMatch) -> bool:
    """Insert the first match of a policy in a task; return False if there was one before."""
    policy = match.policy
    values = (task_id, policy.pattern, policy.action, policy.name, match.line)
    return connection.execute("INSERT OR IGNORE INTO log_matches VALUES (?, ?, ?, ?, ?)", values).rowcount == 1


def log_matches(connection: sqlite3.Connection, task_id: str) -> list[LogMatch]:
    """List the matches of log policies in a task, oldest first."""
    rows = connection.execute("SELECT * FROM log_matches WHERE task_id = ? ORDER BY rowid", (task_id,))
    return [LogMatch(LogPolicy(row["pattern"], row["action"], row["name"]), row["line"]) for row in rows.fetchall()]


def excluded_tasks(connection: sqlite3.Connection) -> set[str]:
    """Return the tasks that a log policy excludes from this machine."""
    rows = connection.execute("SELECT task_id FROM log_matches WHERE action = ?", (EXCLUDE_NODE,))
    return {row[0] for row in rows}


def _smaller(connection: sqlite3.Connection, experiment_id: int) -> bool:
    row = connection.execute("SELECT config FROM experiments WHERE id = ?", (experiment_id,)).fetchone()
    return experiments.smaller_is_better(loads(row[0])) if row else True


def _record(row: sqlite3.Row, more: dict[str, Any]) -> Trial:
    return record(
        Trial,
        row,
        state=TrialState(row["state"]),
        hparams=loads(row["hparams"]),
        pruned=bool(row["pruned"]),
        archived=bool(row["archived"]),
        **more,
    )


def _derived(connection: sqlite3.Connection, row: sqlite3.Row, smaller: bool, *, summary: bool) -> dict[str, Any]:
    number = row["id"]
    best = metrics.best_validation(connection, number, smaller_is_better=smaller)
    saved = connection.execute(
        "SELECT count(*), coalesce(sum(size), 0) FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED'", (number,)
    ).fetchone()
    clock = connection.execute(
        "SELECT coalesce(sum(ended - started), 0) FROM allocations WHERE trial_id = ? AND ended IS NOT NULL", (number,)
    ).fetchone()
    tasks = connection.execute("SELECT task_id FROM allocations WHERE trial_id = ? ORDER BY run_id", (number,))
    return {
        "task_ids": tuple(dict.fromkeys([*(task[0] for task in tasks), row["task_id"]])),
        "latest_validation": metrics.latest_validation(connection, number),
        "best_validation": best[0] if best else None,
        "searcher_metric": best[1] if best else None,
        "checkpoint_count": saved[0],
        "checkpoint_size": saved[1],
        "wall_clock": clock[0],
        "shown_state": experiments.shown_state(
            connection, row["state"], "trial_id", number, unmanaged=row["last_activity"] is not None
        ),
        "summary_metrics": metrics.summary(connection, number) if summary else {},
    }


def _allocation(row: sqlite3.Row) -> Allocation:
    return record(
        Allocation,
        row,
        state=AllocationState(row["state"]),
        slots=tuple(loads(row["slots"])),
        preempt=bool(row["preempt"]),
        acked=bool(row["acked"]),
        ready=bool(row["ready"]),
    )
