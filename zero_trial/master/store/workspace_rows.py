"""Workspaces and the projects in them in the store."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import Any

from zero_trial.master.records import Project, Workspace
from zero_trial.master.store.database import insert, loads, record, update

_PLACES = """
    SELECT p.*, w.name AS workspace_name, w.archived AS workspace_archived
    FROM projects p JOIN workspaces w ON w.id = p.workspace_id
"""
_PROJECTS = """
    SELECT p.*, w.name AS workspace_name, w.archived AS workspace_archived,
        (SELECT count(*) FROM experiments e WHERE e.project_id = p.id) AS experiments,
        (SELECT count(*) FROM experiments e WHERE e.project_id = p.id AND e.ended IS NULL) AS active,
        (SELECT max(created) FROM experiments e WHERE e.project_id = p.id) AS last_started
    FROM projects p JOIN workspaces w ON w.id = p.workspace_id
"""


def add(connection: sqlite3.Connection, workspace: Workspace) -> int:
    """Insert a workspace and return its new id."""
    names = ("name", "owner", "storage")
    return insert(connection, "workspaces", {name: getattr(workspace, name) for name in names})


def add_project(connection: sqlite3.Connection, project: Project) -> int:
    """Insert a project and return its new id."""
    names = ("workspace_id", "name", "key", "owner", "description")
    return insert(connection, "projects", {name: getattr(project, name) for name in names})


def get(connection: sqlite3.Connection, number: int, *, counted: bool = False) -> Workspace | None:
    """Return one workspace; ``counted``: with the number of its projects and experiments."""
    row = connection.execute("SELECT * FROM workspaces WHERE id = ?", (number,)).fetchone()
    return None if row is None else _record(connection, row, counted=counted)


def all_(connection: sqlite3.Connection, *, counted: bool = False) -> list[Workspace]:
    """List all workspaces, oldest first."""
    rows = connection.execute("SELECT * FROM workspaces ORDER BY id").fetchall()
    return [_record(connection, row, counted=counted) for row in rows]


def project(connection: sqlite3.Connection, number: int, *, counted: bool = False) -> Project | None:
    """Return one project; ``counted``: with the number of its experiments."""
    row = connection.execute(f"{_PROJECTS if counted else _PLACES} WHERE p.id = ?", (number,)).fetchone()
    return None if row is None else _project(row)


def projects(
    connection: sqlite3.Connection, workspace_id: int | None = None, *, counted: bool = False
) -> list[Project]:
    """List the projects of a workspace, or all, oldest first."""
    found = f"{_PROJECTS if counted else _PLACES} WHERE ?1 IS NULL OR p.workspace_id = ?1 ORDER BY p.id"
    return [_project(row) for row in connection.execute(found, (workspace_id,)).fetchall()]


def of_projects(connection: sqlite3.Connection) -> dict[int, int]:
    """Return the workspace of each project, by their numbers."""
    return dict(connection.execute("SELECT id, workspace_id FROM projects").fetchall())


def experiments_of(connection: sqlite3.Connection, project_id: int) -> list[int]:
    """List the numbers of the experiments in a project."""
    rows = connection.execute("SELECT id FROM experiments WHERE project_id = ? ORDER BY id", (project_id,))
    return [int(row[0]) for row in rows.fetchall()]


def change(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns of a workspace."""
    update(connection, "workspaces", "id", number, columns)


def change_project(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns of a project."""
    update(connection, "projects", "id", number, columns)


def erase(connection: sqlite3.Connection, number: int) -> None:
    """Delete a workspace and its projects, which have no experiments."""
    connection.execute("DELETE FROM projects WHERE workspace_id = ?", (number,))
    connection.execute("DELETE FROM workspaces WHERE id = ?", (number,))


def erase_project(connection: sqlite3.Connection, number: int) -> None:
    """Delete a project, which has no experiments."""
    connection.execute("DELETE FROM projects WHERE id = ?", (number,))


def _record(connection: sqlite3.Connection, row: sqlite3.Row, *, counted: bool) -> Workspace:
    found = record(
        Workspace,
        row,
        archived=bool(row["archived"]),
        storage=loads(row["storage"]),
    )
    if not counted:
        return found
    projects, experiments = connection.execute(
        "SELECT count(DISTINCT p.id), count(e.id) FROM projects p LEFT JOIN experiments e ON e.project_id = p.id "
        "WHERE p.workspace_id = ?",
        (found.id,),
    ).fetchone()
    return replace(found, projects=projects, experiments=experiments)


def _project(row: sqlite3.Row) -> Project:
    return record(
        Project,
        row,
        archived=bool(row["archived"] or row["workspace_archived"]),
        own_archived=bool(row["archived"]),
        notes=tuple(loads(row["notes"])),
    )
