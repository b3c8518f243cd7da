"""What users keep under a name: models with their versions, and templates of configurations."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from zero_trial.master.records import ModelVersion, Registered, RegisteredModel, Template
from zero_trial.master.store import checkpoint_rows
from zero_trial.master.store.database import insert, loads, record, update

_MODEL = """
    SELECT m.*, coalesce(u.name, '') AS username, (SELECT count(*) FROM model_versions v WHERE v.model_id = m.id) AS num_versions
    FROM models m LEFT JOIN users u ON u.id = m.user_id
"""
_VERSION = """
    SELECT v.*, coalesce(u.name, '') AS username FROM model_versions v LEFT JOIN users u ON u.id = v.user_id
"""
_TEMPLATE = "SELECT t.*, coalesce(u.name, '') AS username FROM templates t LEFT JOIN users u ON u.id = t.user_id"


def models(connection: sqlite3.Connection) -> list[RegisteredModel]:
    """List all models, oldest first."""
    return [_model(row) for row in connection.execute(f"{_MODEL} ORDER BY m.id").fetchall()]


def model(connection: sqlite3.Connection, number: int) -> RegisteredModel | None:
    """Return a model by id."""
    row = connection.execute(f"{_MODEL} WHERE m.id = ?", (number,)).fetchone()
    return None if row is None else _model(row)


def model_named(connection: sqlite3.Connection, name: str) -> RegisteredModel | None:
    """Return a model by name."""
    row = connection.execute(f"{_MODEL} WHERE m.name = ?", (name,)).fetchone()
    return None if row is None else _model(row)


def add_model(connection: sqlite3.Connection, values: Mapping[str, Any]) -> int:
    """Insert a model and return its id."""
    return insert(connection, "models", values)


def change_model(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns."""
    update(connection, "models", "id", number, columns)


def drop_model(connection: sqlite3.Connection, number: int) -> None:
    """Delete a model with its versions; their checkpoints stay."""
    connection.execute("DELETE FROM model_versions WHERE model_id = ?", (number,))
    connection.execute("DELETE FROM models WHERE id = ?", (number,))


def versions(connection: sqlite3.Connection, of: RegisteredModel) -> list[ModelVersion]:
    """List the versions of a model by number."""
    rows = connection.execute(f"{_VERSION} WHERE v.model_id = ? ORDER BY v.version", (of.id,))
    return [_version(connection, of, row) for row in rows.fetchall()]


def version(connection: sqlite3.Connection, of: RegisteredModel, number: int) -> ModelVersion | None:
    """Return one version of a model."""
    row = connection.execute(f"{_VERSION} WHERE v.model_id = ? AND v.version = ?", (of.id, number)).fetchone()
    return None if row is None else _version(connection, of, row)


def add_version(connection: sqlite3.Connection, model_id: int, values: Mapping[str, Any]) -> int:
    """Insert the next version of a model and return its number: one more than the largest that is
    there."""
    row = connection.execute(
        "SELECT coalesce(max(version), 0) + 1 FROM model_versions WHERE model_id = ?", (model_id,)
    ).fetchone()
    insert(connection, "model_versions", {"model_id": model_id, "version": row[0], **values})
    return int(row[0])


def change_version(connection: sqlite3.Connection, row_id: int, **columns: Any) -> None:
    """Set columns."""
    update(connection, "model_versions", "id", row_id, columns)


def drop_version(connection: sqlite3.Connection, row_id: int) -> None:
    """Delete a version; its checkpoint stays."""
    connection.execute("DELETE FROM model_versions WHERE id = ?", (row_id,))


def registered(connection: sqlite3.Connection, uuids: Iterable[str] | None = None) -> list[Registered]:
    """List the checkpoints that are versions of models: all, or those of ``uuids``."""
    rows = connection.execute(
        "SELECT v.checkpoint_uuid AS uuid, m.name AS model_name, m.id AS model_id, v.version "
        "FROM model_versions v JOIN models m ON m.id = v.model_id ORDER BY v.id"
    )
    asked = None if uuids is None else set(uuids)
    return [record(Registered, row) for row in rows.fetchall() if asked is None or row["uuid"] in asked]


def templates(connection: sqlite3.Connection) -> list[Template]:
    """List all templates by name."""
    return [_template(row) for row in connection.execute(f"{_TEMPLATE} ORDER BY t.name").fetchall()]


def template(connection: sqlite3.Connection, name: str) -> Template | None:
    """Return a template by name."""
    row = connection.execute(f"{_TEMPLATE} WHERE t.name = ?", (name,)).fetchone()
    return None if row is None else _template(row)


def add_template(connection: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    """Insert a template."""
    insert(connection, "templates", values)


def change_template(connection: sqlite3.Connection, named: str, **columns: Any) -> None:
    """Set columns."""
    update(connection, "templates", "name", named, columns)


def drop_template(connection: sqlite3.Connection, name: str) -> None:
    """Delete a template; no effect if it is unknown."""
    connection.execute("DELETE FROM templates WHERE name = ?", (name,))


def _model(row: sqlite3.Row) -> RegisteredModel:
    archived, labels = bool(row["archived"]), tuple(loads(row["labels"]))
    return record(RegisteredModel, row, archived=archived, labels=labels, metadata=loads(row["metadata"]))


def _version(connection: sqlite3.Connection, of: RegisteredModel, row: sqlite3.Row) -> ModelVersion:
    saved = checkpoint_rows.get(connection, row["checkpoint_uuid"])
    if saved is None:
        raise LookupError(f"checkpoint {row['checkpoint_uuid']} of model {of.name!r} is not in the store")
    labels, metadata = tuple(loads(row["labels"])), loads(row["metadata"])
    return record(ModelVersion, row, model=of, checkpoint=saved, labels=labels, metadata=metadata)


def _template(row: sqlite3.Row) -> Template:
    return record(Template, row, config=loads(row["config"]))
