"""Experiments and their context directories in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from zero_trial.master.records import AllocationState, Experiment, ExperimentState, Project
from zero_trial.master.store import user_rows
from zero_trial.master.store.database import insert, loads, record, update

_GIVEN = (
    *("state", "config", "original_config", "owner", "job_id", "created", "parent_id"),
    *("name", "description", "labels", "notes", "unmanaged", "external_id", "project_id"),
)
_BEST = """
    SELECT m.trial_id, m.searcher_metric FROM trials t JOIN metrics m ON m.id = (
        SELECT id FROM metrics WHERE trial_id = t.id AND archived = 0 AND searcher_metric IS NOT NULL
        ORDER BY searcher_metric {order}, id LIMIT 1
    )
    WHERE t.experiment_id = ? ORDER BY m.searcher_metric {order}, m.id LIMIT 1
"""


def add(connection: sqlite3.Connection, experiment: Experiment, context: bytes) -> int:
    """Insert an experiment and return its new id (``experiment.id`` is ignored)."""
    number = insert(connection, "experiments", {name: getattr(experiment, name) for name in _GIVEN})
    connection.execute("INSERT INTO contexts VALUES (?, ?)", (number, context))
    return number


def get(connection: sqlite3.Connection, number: int, *, derived: bool = True) -> Experiment | None:
    """Return one experiment. ``derived``: also count its trials and checkpoints."""
    row = connection.execute("SELECT * FROM experiments WHERE id = ?", (number,)).fetchone()
    project = partial(user_rows.project, connection) if derived else None
    return None if row is None else _record(connection, row, project)


def get_all(connection: sqlite3.Connection, numbers: Iterable[int]) -> list[Experiment]:
    """Return the experiments with these ids that still exist, as `get` does."""
    return [found for number in numbers if (found := get(connection, number)) is not None]


def config(connection: sqlite3.Connection, number: int) -> dict[str, Any] | None:
    """Return the completed configuration of an experiment."""
    row = connection.execute("SELECT config FROM experiments WHERE id = ?", (number,)).fetchone()
    return None if row is None else loads(row[0])


def state_of(connection: sqlite3.Connection, number: int) -> tuple[ExperimentState, bool] | None:
    """Return the state of an experiment, and whether it is unmanaged."""
    row = connection.execute("SELECT state, unmanaged FROM experiments WHERE id = ?", (number,)).fetchone()
    return None if row is None else (ExperimentState(row[0]), bool(row[1]))


def of_external_id(connection: sqlite3.Connection, external_id: str) -> int | None:
    """Return the id of the unmanaged experiment with this external id."""
    row = connection.execute("SELECT id FROM experiments WHERE external_id = ?", (external_id,)).fetchone()
    return None if row is None else int(row[0])


def all_(connection: sqlite3.Connection, *, counted: bool = True) -> Iterator[Experiment]:
    """Yield all experiments, oldest first. ``counted``: also count trials and checkpoints."""
    project = cache(partial(user_rows.project, connection))
    for row in connection.execute("SELECT * FROM experiments ORDER BY id"):
        yield _record(connection, row, project, counted=counted)


def in_states(connection: sqlite3.Connection, *states: ExperimentState) -> list[Experiment]:
    """List the experiments in these states, oldest first, without derived fields."""
    marks = ",".join("?" for _ in states)
    rows = connection.execute(
        f"SELECT * FROM experiments WHERE state IN ({marks}) ORDER BY id", [state.value for state in states]
    )
    return [_record(connection, row, None) for row in rows.fetchall()]


def of_project(connection: sqlite3.Connection, project_id: int) -> list[int]:
    """List the ids of the experiments in a project."""
    return [
        row[0]
        for row in connection.execute("SELECT id FROM experiments WHERE project_id = ?", (project_id,)).fetchall()
    ]


def change(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns."""
    update(connection, "experiments", "id", number, columns)


def context(connection: sqlite3.Connection, number: int) -> bytes | None:
    """Return the model definition as .tar.gz."""
    row = connection.execute("SELECT tgz FROM contexts WHERE experiment_id = ?", (number,)).fetchone()
    return None if row is None else bytes(row[0])


def snapshot(connection: sqlite3.Connection, number: int) -> dict[str, Any]:
    """Return the snapshot of the search after its last event."""
    row = connection.execute("SELECT snapshot FROM experiments WHERE id = ?", (number,)).fetchone()
    return dict(loads(row[0])) if row else {}


def to_collect(connection: sqlite3.Connection) -> list[int]:
    """List the ended experiments whose garbage collection policy is still to be applied."""
    return [row[0] for row in connection.execute("SELECT id FROM experiments WHERE collect = 1 ORDER BY id")]


def erase(connection: sqlite3.Connection, number: int) -> None:
    """Delete an experiment and all rows that belong to it."""
    known = "SELECT id FROM trials WHERE experiment_id = ?"
    runs = f"FROM allocations WHERE trial_id IN ({known})"
    connection.execute(f"DELETE FROM tokens WHERE allocation_id IN (SELECT id {runs})", (number,))
    connection.execute(f"DELETE FROM log_matches WHERE task_id IN (SELECT task_id {runs})", (number,))
    for table in ("metrics", "summaries", "allocations"):
        connection.execute(f"DELETE FROM {table} WHERE trial_id IN ({known})", (number,))
    for table in ("trials", "checkpoints", "contexts"):
        connection.execute(f"DELETE FROM {table} WHERE experiment_id = ?", (number,))
    connection.execute("DELETE FROM experiments WHERE id = ?", (number,))


def best(connection: sqlite3.Connection, number: int, *, smaller_is_better: bool) -> tuple[int, float] | None:
    """Return the trial id and value of the best validation by the searcher's metric."""
    order = "ASC" if smaller_is_better else "DESC"
    row = connection.execute(_BEST.format(order=order), (number,)).fetchone()
    return None if row is None else (row[0], row[1])


def smaller_is_better(config: Mapping[str, Any]) -> bool:
    """Return whether the searcher minimizes its metric."""
    return bool(config.get("searcher", {}).get("smaller_is_better", True))


def _record(
    connection: sqlite3.Connection,
    row: sqlite3.Row,
    project: Callable[[int], Project | None] | None,
    *,
    counted: bool = True,
) -> Experiment:
    """Return an experiment. With ``project``, which looks up a project, include derived fields."""
    more: dict[str, Any] = {}
    if project is not None:
        more = {"project": project(row["project_id"]), "shown_state": _shown_state(connection, row)}
        if counted:
            more |= _counts(connection, row["id"], loads(row["config"]))
    return record(Experiment, row, **more)


def _counts(connection: sqlite3.Connection, number: int, config: Mapping[str, Any]) -> dict[str, Any]:
    found = best(connection, number, smaller_is_better=smaller_is_better(config))
    counts = connection.execute(
        "SELECT count(*), coalesce(sum(pruned), 0), min(id) FROM trials WHERE experiment_id = ?", (number,)
    ).fetchone()
    # with a single trial, that trial is the best even before it has reported the searcher's metric
    single = (config.get("searcher") or {}).get("name") == "single"
    saved = connection.execute(
        "SELECT count(*), coalesce(sum(size), 0) FROM checkpoints WHERE experiment_id = ? AND state != 'DELETED'",
        (number,),
    ).fetchone()
    return {
        "num_trials": counts[0],
        "pruned_trials": counts[1],
        "best_trial_id": found[0] if found else counts[2] if single else None,
        "best_metric": found[1] if found else None,
        "checkpoint_count": saved[0],
        "checkpoint_size": saved[1],
    }


def _shown_state(connection: sqlite3.Connection, row: sqlite3.Row) -> str:
    states = set()
    if row["state"] == ExperimentState.ACTIVE.value:
        runs = "SELECT DISTINCT state FROM allocations WHERE experiment_id = ? AND state != 'TERMINATED'"
        states = {each[0] for each in connection.execute(runs, (row["id"],))}
    return furthest(row["state"], states, unmanaged=bool(row["unmanaged"]))


def furthest(state: str, runs: Collection[str], *, unmanaged: bool) -> str:
    """Refine the ACTIVE state by the states of its runs; unmanaged experiments are RUNNING."""
    if state != ExperimentState.ACTIVE.value:
        return state
    if unmanaged:
        return AllocationState.RUNNING.value
    for candidate in (AllocationState.RUNNING, AllocationState.STARTING, AllocationState.QUEUED):
        if candidate.value in runs:
            return str(candidate.value)
    return state
