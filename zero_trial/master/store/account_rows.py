"""Users, tokens and the few single values of the store."""

from __future__ import annotations

import sqlite3
from typing import Any

from zero_trial.master.records import User
from zero_trial.master.store.database import insert, record, update


def user(connection: sqlite3.Connection, name: str) -> User | None:
    """Return a user by name."""
    row = connection.execute("SELECT * FROM users WHERE name = ?", (name,)).fetchone()
    return None if row is None else _record(row)


def user_by_id(connection: sqlite3.Connection, number: int) -> User | None:
    """Return a user by id."""
    row = connection.execute("SELECT * FROM users WHERE id = ?", (number,)).fetchone()
    return None if row is None else _record(row)


def users(connection: sqlite3.Connection) -> list[User]:
    """List all users, oldest first."""
    return [_record(row) for row in connection.execute("SELECT * FROM users ORDER BY id").fetchall()]


def add_user(connection: sqlite3.Connection, account: User) -> int:
    """Insert a user and return its new id (``account.id`` is ignored)."""
    names = ("name", "admin", "active", "password", "display_name")
    return insert(connection, "users", {name: getattr(account, name) for name in names})


def change_user(connection: sqlite3.Connection, number: int, **columns: Any) -> None:
    """Set columns. A new name is written to everything the user owns by name, too."""
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
    """Insert a token of a user or of an allocation, exactly one of the two."""
    connection.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?)", (digest, user_id, allocation_id, expires))


def drop_expired(connection: sqlite3.Connection, now: float) -> None:
    """Delete all tokens that have expired."""
    connection.execute("DELETE FROM tokens WHERE expires <= ?", (now,))


def drop_token(connection: sqlite3.Connection, digest: str) -> None:
    """Delete a token; no effect if it is unknown."""
    connection.execute("DELETE FROM tokens WHERE digest = ?", (digest,))


def drop_tokens_of_user(connection: sqlite3.Connection, number: int, *, but: str) -> None:
    """Delete all tokens of a user except the one with the digest ``but``."""
    connection.execute("DELETE FROM tokens WHERE user_id = ? AND digest != ?", (number, but))


def drop_tokens_of(connection: sqlite3.Connection, allocation_id: str) -> None:
    """Delete all tokens of an allocation."""
    connection.execute("DELETE FROM tokens WHERE allocation_id = ?", (allocation_id,))


def token(connection: sqlite3.Connection, digest: str, now: float) -> User | str | None:
    """Return the user or the id of the allocation that a token belongs to; None if it is unknown,
    or has expired.
    """
    row = connection.execute(
        "SELECT u.*, t.allocation_id FROM tokens t LEFT JOIN users u ON u.id = t.user_id "
        "WHERE t.digest = ? AND (t.expires IS NULL OR t.expires > ?)",
        (digest, now),
    ).fetchone()
    if row is None:
        return None
    name: str | None = row["allocation_id"]
    return name if row["id"] is None else _record(row)


def value(connection: sqlite3.Connection, key: str) -> str | None:
    """Return a single value."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row[0])


def set_value(connection: sqlite3.Connection, key: str, text: str) -> None:
    """Set a single value."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, text))


def disabled_slots(connection: sqlite3.Connection) -> dict[int, bool]:
    """Return the slots that are not assigned, and of each whether it drains."""
    return {row[0]: bool(row[1]) for row in connection.execute("SELECT number, draining FROM disabled_slots")}


def enable_slot(connection: sqlite3.Connection, number: int, enabled: bool, *, draining: bool = False) -> None:
    """Let a slot be assigned, or no longer."""
    if enabled:
        connection.execute("DELETE FROM disabled_slots WHERE number = ?", (number,))
    else:
        connection.execute("INSERT OR REPLACE INTO disabled_slots VALUES (?, ?)", (number, int(draining)))


def _record(row: sqlite3.Row) -> User:
    return record(User, row, admin=bool(row["admin"]), active=bool(row["active"]))
