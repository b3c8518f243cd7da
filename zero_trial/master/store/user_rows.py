"""User-owned rows: accounts and tokens, workspaces and their projects, and templates; also the
slots that an administrator has disabled."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import Any

from zero_trial.master.records import Project, Template, User, Workspace
from zero_trial.master.store.database import insert, record, update

# -- accounts


def user(connection: sqlite3.Connection, who: str | int) -> User | None:
    """Return a user by name or id."""
    column = "id" if isinstance(who, int) else "name"
    row = connection.execute(f"SELECT * FROM users WHERE {column} = ?", (who,)).fetchone()
    return None if row is None else record(User, row)


def users(connection: sqlite3.Connection) -> list[User]:
    """List all users, oldest first."""
    return [record(User, row) for row in connection.execute("SELECT * FROM users ORDER BY id").fetchall()]


def add_user(connection: sqlite3.Connection, account: User) -> int:
    """Insert a user and return its new id (``account.id`` is ignored)."""
    names = ("name", "admin", "active", "password", "display_name")
    return insert(connection, "users", {name: getattr(account, name) for name in names})


def change_user(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns. A new name also replaces the owner name of everything that the user owns."""
    if "name" in columns:
        for table in ("experiments", "workspaces", "projects"):
            connection.execute(
                f"UPDATE {table} SET owner = :name WHERE owner = (SELECT name FROM users WHERE id = :id)",
                {"name": columns["name"], "id": number},
            )
    update(connection, "users", "id", number, columns)


def add_token(
    connection: sqlite3.Connection,
    digest: str,
    *,
    user_id: int | None = None,
    allocation_id: str | None = None,
    expires: float | None = None,
) -> None:
    """Insert a token of exactly one owner: a user or an allocation."""
    connection.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?)", (digest, user_id, allocation_id, expires))


def token(connection: sqlite3.Connection, digest: str, now: float) -> User | str | None:
    """Return the user or allocation id of a token; None if the token is unknown or has expired."""
    row = connection.execute(
        "SELECT u.*, t.allocation_id FROM tokens t LEFT JOIN users u ON u.id = t.user_id "
        "WHERE t.digest = ? AND (t.expires IS NULL OR t.expires > ?)",
        (digest, now),
    ).fetchone()
    if row is None:
        return None
    name: str | None = row["allocation_id"]
    return name if row["id"] is None else record(User, row)


def disabled_slots(connection: sqlite3.Connection) -> dict[int, bool]:
    """Return the disabled slots, and whether each of them is draining."""
    return {row[0]: bool(row[1]) for row in connection.execute("SELECT number, draining FROM disabled_slots")}


def enable_slot(connection: sqlite3.Connection, number: int, enabled: bool, *, draining: bool = False) -> None:
    """Enable or disable a slot for assignment."""
    if enabled:
        connection.execute("DELETE FROM disabled_slots WHERE number = ?", (number,))
    else:
        connection.execute("INSERT OR REPLACE INTO disabled_slots VALUES (?, ?)", (number, int(draining)))


# -- workspaces and projects

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


def workspace(connection: sqlite3.Connection, number: int, *, counted: bool = False) -> Workspace | None:
    """Return one workspace. ``counted``: with the number of its projects and experiments."""
    row = connection.execute("SELECT * FROM workspaces WHERE id = ?", (number,)).fetchone()
    return None if row is None else _workspace(connection, row, counted=counted)


def workspaces(connection: sqlite3.Connection, *, counted: bool = False) -> list[Workspace]:
    """List all workspaces, oldest first."""
    rows = connection.execute("SELECT * FROM workspaces ORDER BY id").fetchall()
    return [_workspace(connection, row, counted=counted) for row in rows]


def project(connection: sqlite3.Connection, number: int, *, counted: bool = False) -> Project | None:
    """Return one project. ``counted``: with the number of its experiments."""
    row = connection.execute(f"{_PROJECTS if counted else _PLACES} WHERE p.id = ?", (number,)).fetchone()
    return None if row is None else _project(row)


def projects(
    connection: sqlite3.Connection, workspace_id: int | None = None, *, counted: bool = False
) -> list[Project]:
    """List the projects of a workspace, or all projects, oldest first."""
    found = f"{_PROJECTS if counted else _PLACES} WHERE ?1 IS NULL OR p.workspace_id = ?1 ORDER BY p.id"
    return [_project(row) for row in connection.execute(found, (workspace_id,)).fetchall()]


def workspaces_of_projects(connection: sqlite3.Connection) -> dict[int, int]:
    """Return the workspace id of each project id."""
    return dict(connection.execute("SELECT id, workspace_id FROM projects").fetchall())


def _workspace(connection: sqlite3.Connection, row: sqlite3.Row, *, counted: bool) -> Workspace:
    found = record(Workspace, row)
    if not counted:
        return found
    projects, experiments = connection.execute(
        "SELECT count(DISTINCT p.id), count(e.id) FROM projects p LEFT JOIN experiments e ON e.project_id = p.id "
        "WHERE p.workspace_id = ?",
        (found.id,),
    ).fetchone()
    return replace(found, projects=projects, experiments=experiments)


def _project(row: sqlite3.Row) -> Project:
    archived = bool(row["archived"])
    return record(Project, row, archived=archived or bool(row["workspace_archived"]), own_archived=archived)


# -- templates of configurations

_TEMPLATE = "SELECT t.*, coalesce(u.name, '') AS username FROM templates t LEFT JOIN users u ON u.id = t.user_id"


def templates(connection: sqlite3.Connection) -> list[Template]:
    """List all templates by name."""
    return [record(Template, row) for row in connection.execute(f"{_TEMPLATE} ORDER BY t.name").fetchall()]


def template(connection: sqlite3.Connection, name: str) -> Template | None:
    """Return a template by name."""
    row = connection.execute(f"{_TEMPLATE} WHERE t.name = ?", (name,)).fetchone()
    return None if row is None else record(Template, row)
