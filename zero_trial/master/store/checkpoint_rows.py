"""Checkpoints in the store, the checkpoints that trials still start from, and models, whose
versions are checkpoints. Checkpoint files are in the experiment's checkpoint storage."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from zero_trial.master.records import (
    Checkpoint,
    ExperimentState,
    ModelVersion,
    Registered,
    RegisteredModel,
)
from zero_trial.master.store import experiment_rows, metric_rows
from zero_trial.master.store.database import dumps, insert, loads, record, update

_SAME = (
    *("uuid", "state", "trial_id", "experiment_id", "task_id", "allocation_id", "reported", "metadata", "resources"),
    *("size", "storage_id"),
)
_UNFINISHED = tuple(state for state in ExperimentState if not state.final)


def put(connection: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    """Insert a checkpoint, or replace it by UUID (the harness may report a checkpoint twice)."""
    values = {name: getattr(checkpoint, name) for name in _SAME}
    insert(connection, "checkpoints", {**values, "steps": checkpoint.steps_completed}, "INSERT OR REPLACE")


def get(connection: sqlite3.Connection, uuid: str, *, derived: bool = True) -> Checkpoint | None:
    """Return one checkpoint. ``derived``: with its trial's config and validation."""
    found = _listed(connection, "c.uuid = ?", uuid, derived=derived)
    return found[0] if found else None


def trial_of(connection: sqlite3.Connection, uuid: str) -> int | None:
    """Return the trial that saved a checkpoint; None if the trial is unknown."""
    row = connection.execute("SELECT trial_id FROM checkpoints WHERE uuid = ?", (uuid,)).fetchone()
    return None if row is None else row[0]


def of_trial(connection: sqlite3.Connection, trial_id: int) -> list[Checkpoint]:
    """List the checkpoints of a trial, ordered by steps, then time."""
    return _listed(connection, "c.trial_id = ?", trial_id, "steps, reported, rowid")


def of_experiment(connection: sqlite3.Connection, experiment_id: int) -> list[Checkpoint]:
    """List the checkpoints of an experiment, ordered by time."""
    return _listed(connection, "c.experiment_id = ?", experiment_id)


def latest(connection: sqlite3.Connection, trial_id: int) -> Checkpoint | None:
    """Return the newest restorable checkpoint of a trial."""
    restorable = "c.trial_id = ? AND c.state = 'COMPLETED' AND c.doomed = 0"
    found = _listed(connection, restorable, trial_id, "reported DESC, rowid DESC LIMIT 1", derived=False)
    return found[0] if found else None


def storage_number(connection: sqlite3.Connection, section: Mapping[str, Any]) -> int:
    """Return the id of a ``checkpoint_storage`` section; insert the section if it is new."""
    text = dumps(dict(sorted(section.items())))
    connection.execute("INSERT OR IGNORE INTO storages (section) VALUES (?)", (text,))
    return int(connection.execute("SELECT id FROM storages WHERE section = ?", (text,)).fetchone()[0])


def change(connection: sqlite3.Connection, uuid: str, **columns: Any) -> None:
    """Set columns."""
    update(connection, "checkpoints", "uuid", uuid, columns)


def mark_deleted(connection: sqlite3.Connection, uuids: Iterable[str]) -> None:
    """Mark checkpoints for deletion from disk; they stay marked until their files are deleted."""
    connection.executemany(
        "UPDATE checkpoints SET doomed = 1 WHERE uuid = ? AND state NOT IN ('DELETED')", [(uuid,) for uuid in uuids]
    )


def is_marked(connection: sqlite3.Connection, uuid: str) -> bool:
    """Return whether a checkpoint is marked for deletion."""
    row = connection.execute("SELECT doomed FROM checkpoints WHERE uuid = ?", (uuid,)).fetchone()
    return row is not None and bool(row[0])


def marked_deleted(connection: sqlite3.Connection) -> list[Checkpoint]:
    """List the checkpoints that are marked for deletion."""
    return _listed(connection, "c.doomed = 1 AND ?", 1)


def source_of(connection: sqlite3.Connection, config: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that new trials of an experiment start from; None if they start from
    scratch.

    This is ``searcher.source_checkpoint_uuid``, or the newest checkpoint of
    ``searcher.source_trial_id``.
    """
    searcher = config.get("searcher") or {}
    if searcher.get("source_checkpoint_uuid"):
        return str(searcher["source_checkpoint_uuid"])
    if searcher.get("source_trial_id") is not None:
        found = latest(connection, int(searcher["source_trial_id"]))
        return found.uuid if found else None
    return None


def sources_in_use(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the checkpoints that trials start from, each with one unfinished experiment."""
    rows = connection.execute(
        "SELECT warm_start_checkpoint, experiment_id FROM trials WHERE warm_start_checkpoint IS NOT NULL "
        "AND state NOT IN ('COMPLETED', 'CANCELED', 'ERROR')"
    )
    found = {str(name): int(number) for name, number in rows.fetchall()}
    for experiment in experiment_rows.in_states(connection, *_UNFINISHED):
        name = source_of(connection, experiment.config)
        if name is not None:
            found[name] = experiment.id
    return found


def _listed(
    connection: sqlite3.Connection, which: str, value: object, order: str = "reported, rowid", *, derived: bool = True
) -> list[Checkpoint]:
    """List checkpoints. ``derived``: with the validations at their steps, and with fields of their
    trial and experiment.

    Args:
        which: SQL condition on the checkpoints ``c``, with one parameter: ``value``.
    """
    columns = "c.*, c.steps AS steps_completed"
    rows = connection.execute(
        f"SELECT {columns} FROM checkpoints c WHERE {which} ORDER BY {order}", (value,)
    ).fetchall()
    validations = metric_rows.validations_at_checkpoints(connection, which, value) if derived and rows else {}
    shared: dict[tuple[int | None, int | None], Mapping[str, Any]] = {}
    sections: dict[int | None, Mapping[str, Any] | None] = {None: None}
    found = []
    for row in rows:
        place, section = (row["trial_id"], row["experiment_id"]), row["storage_id"]
        if derived and place not in shared:
            shared[place] = _of_trial(connection, *place)
        if section not in sections:
            sections[section] = _section(connection, section)
        more = dict(shared.get(place, {}))
        validation = validations.get((row["trial_id"], row["steps"])) if more else None
        if validation is not None:
            more["validation_metrics"], more["searcher_metric"] = validation
        found.append(record(Checkpoint, row, storage=sections[section], **more))
    return found


def _section(connection: sqlite3.Connection, storage_id: int) -> Mapping[str, Any] | None:
    row = connection.execute("SELECT section FROM storages WHERE id = ?", (storage_id,)).fetchone()
    return loads(row[0]) if row is not None else None


def _of_trial(connection: sqlite3.Connection, trial_id: int | None, experiment_id: int | None) -> Mapping[str, Any]:
    """Return the fields of a checkpoint that come from its trial; empty if there is no trial."""
    found = connection.execute(
        "SELECT t.hparams, e.config FROM experiments e LEFT JOIN trials t ON t.id = ?1 WHERE e.id = ?2 AND ?1 NOTNULL",
        (trial_id, experiment_id),
    ).fetchone()
    if found is None:
        return {}
    return {"hparams": loads(found["hparams"]) or {}, "experiment_config": loads(found["config"])}


# -- models, whose versions are checkpoints

_MODEL = """
    SELECT m.*, coalesce(u.name, '') AS username, (SELECT count(*) FROM model_versions v WHERE v.model_id = m.id) AS num_versions
    FROM models m LEFT JOIN users u ON u.id = m.user_id
"""
_VERSION = """
    SELECT v.*, coalesce(u.name, '') AS username FROM model_versions v LEFT JOIN users u ON u.id = v.user_id
"""


def models(connection: sqlite3.Connection) -> list[RegisteredModel]:
    """List all models, oldest first."""
    return [record(RegisteredModel, row) for row in connection.execute(f"{_MODEL} ORDER BY m.id").fetchall()]


def model(connection: sqlite3.Connection, which: str | int) -> RegisteredModel | None:
    """Return a model by name or id."""
    column = "id" if isinstance(which, int) else "name"
    row = connection.execute(f"{_MODEL} WHERE m.{column} = ?", (which,)).fetchone()
    return None if row is None else record(RegisteredModel, row)


def versions(connection: sqlite3.Connection, of: RegisteredModel) -> list[ModelVersion]:
    """List the versions of a model, ordered by number."""
    rows = connection.execute(f"{_VERSION} WHERE v.model_id = ? ORDER BY v.version", (of.id,))
    return [_version(connection, of, row) for row in rows.fetchall()]


def version(connection: sqlite3.Connection, of: RegisteredModel, number: int) -> ModelVersion | None:
    """Return one version of a model."""
    row = connection.execute(f"{_VERSION} WHERE v.model_id = ? AND v.version = ?", (of.id, number)).fetchone()
    return None if row is None else _version(connection, of, row)


def add_version(connection: sqlite3.Connection, model_id: int, values: Mapping[str, Any]) -> int:
    """Insert the next version of a model and return its number."""
    row = connection.execute(
        "SELECT coalesce(max(version), 0) + 1 FROM model_versions WHERE model_id = ?", (model_id,)
    ).fetchone()
    insert(connection, "model_versions", {"model_id": model_id, "version": row[0], **values})
    return int(row[0])


def registered(connection: sqlite3.Connection, uuids: Iterable[str] | None = None) -> list[Registered]:
    """List the checkpoints that are model versions: all, or only those in ``uuids``."""
    rows = connection.execute(
        "SELECT v.checkpoint_uuid AS uuid, m.name AS model_name, m.id AS model_id, v.version "
        "FROM model_versions v JOIN models m ON m.id = v.model_id ORDER BY v.id"
    )
    asked = None if uuids is None else set(uuids)
    return [record(Registered, row) for row in rows.fetchall() if asked is None or row["uuid"] in asked]


def _version(connection: sqlite3.Connection, of: RegisteredModel, row: sqlite3.Row) -> ModelVersion:
    saved = get(connection, row["checkpoint_uuid"])
    if saved is None:
        raise LookupError(f"checkpoint {row['checkpoint_uuid']} of model {of.name!r} is not in the store")
    return record(ModelVersion, row, model=of, checkpoint=saved)
