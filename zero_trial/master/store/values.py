"""Values of the store's columns: JSON text, and rows turned into records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any


def dumps(value: Any) -> str:
    """JSON text without blanks."""
    return json.dumps(value, separators=(",", ":"))


def loads(text: str | None) -> Any:
    """The value of a JSON column; None for NULL."""
    return None if text is None else json.loads(text)


def update(connection: sqlite3.Connection, table: str, key: str, value: Any, changes: Mapping[str, Any]) -> None:
    """Set columns of one row. Table, key and columns are the caller's own words, never a user's; lists and dicts become JSON."""
    if not changes:
        return
    columns = ", ".join(f"{name} = ?" for name in changes)
    connection.execute(f"UPDATE {table} SET {columns} WHERE {key} = ?", [*map(plain, changes.values()), value])


def insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int:
    """Insert one row; returns its rowid."""
    names = ", ".join(values)
    marks = ", ".join("?" for _ in values)
    cursor = connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(map(plain, values.values())))
    return int(cursor.lastrowid or 0)


def plain(value: Any) -> Any:
    """A value as SQLite takes it."""
    if isinstance(value, (dict, list, tuple, Mapping)):
        return dumps(value)
    if isinstance(value, str):
        return str(getattr(value, "value", value))  # of an enum its word
    return value
