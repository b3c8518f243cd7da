"""Sources: the checkpoints of other trials that trials take their weights from, and who still needs them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from zero_trial.master.errors import Conflict, Invalid
from zero_trial.master.records import CheckpointState, ExperimentState
from zero_trial.master.store import checkpoints, experiments, trials

_UNFINISHED = tuple(state for state in ExperimentState if not state.final)


def source_of(connection: sqlite3.Connection, config: Mapping[str, Any]) -> str | None:
    """The checkpoint that an experiment's new trials start from: ``searcher.source_checkpoint_uuid``, or the newest of
    ``searcher.source_trial_id``.
    """
    searcher = config.get("searcher") or {}
    if searcher.get("source_checkpoint_uuid"):
        return str(searcher["source_checkpoint_uuid"])
    if searcher.get("source_trial_id") is not None:
        found = checkpoints.latest(connection, int(searcher["source_trial_id"]))
        return found.uuid if found else None
    return None


def check_source(connection: sqlite3.Connection, config: Mapping[str, Any]) -> None:
    """Invalid unless the checkpoint that ``config`` names is there, whole."""
    searcher = config.get("searcher") or {}
    trial, saved = searcher.get("source_trial_id"), searcher.get("source_checkpoint_uuid")
    if saved:
        found = checkpoints.get(connection, str(saved), derived=False)
        if found is None:
            raise Invalid("there is no such checkpoint", where="searcher.source_checkpoint_uuid", got=saved)
        if found.state is not CheckpointState.COMPLETED:
            raise Invalid(f"this checkpoint is {found.state.value}", where="searcher.source_checkpoint_uuid", got=saved)
    elif trial is not None:
        if trials.get(connection, int(trial)) is None:
            raise Invalid("there is no such trial", where="searcher.source_trial_id", got=trial)
        if checkpoints.latest(connection, int(trial)) is None:
            raise Invalid("this trial has no checkpoint to start from", where="searcher.source_trial_id", got=trial)


def needed(connection: sqlite3.Connection) -> dict[str, int]:
    """Checkpoint -> an experiment that has not ended and of which a trial starts from it, or will when the search makes one."""
    rows = connection.execute(
        "SELECT warm_start_checkpoint, experiment_id FROM trials WHERE warm_start_checkpoint IS NOT NULL "
        "AND state NOT IN ('COMPLETED', 'CANCELED', 'ERROR')"
    )
    found = {str(name): int(number) for name, number in rows.fetchall()}
    for number in experiments.ids(connection, *_UNFINISHED):
        experiment = experiments.get(connection, number, derived=False)
        name = None if experiment is None else source_of(connection, experiment.config)
        if name is not None:
            found[name] = number
    return found


def require_unneeded(connection: sqlite3.Connection, uuids: Iterable[str]) -> None:
    """Conflict if somebody still starts from one of these checkpoints."""
    users = needed(connection)
    for uuid in uuids:
        if uuid in users:
            raise Conflict(
                f"experiment {users[uuid]} starts from checkpoint {uuid}",
                fix=f"Wait for experiment {users[uuid]}, or kill it.",
            )
