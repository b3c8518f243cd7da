"""The master's SQLite file: its schema, and functions to open it for writing and reading.

WAL with ``synchronous = NORMAL``: committed transactions survive the end of the process (including
``kill -9``). After a power failure, the newest transactions may be missing, but never part of one.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from zero_trial.errors import ConfigError
from zero_trial.master.records import Unavailable

T = TypeVar("T")

SCHEMA_VERSION = 15
"""SQLite's ``user_version`` of the files that this version reads and writes."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

CREATE TABLE experiments (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    state TEXT NOT NULL,
    config TEXT NOT NULL,
    original_config TEXT NOT NULL,
    owner TEXT NOT NULL,
    job_id TEXT NOT NULL,
    created REAL NOT NULL,
    ended REAL,
    parent_id INTEGER,
    archived INTEGER NOT NULL DEFAULT 0,
    name TEXT NOT NULL,
    description TEXT NOT NULL DEFAULT '',
    labels TEXT NOT NULL DEFAULT '[]',
    notes TEXT NOT NULL DEFAULT '',
    progress REAL,
    error TEXT NOT NULL DEFAULT '',
    snapshot TEXT NOT NULL DEFAULT '{}',
    collect INTEGER NOT NULL DEFAULT 0,
    unmanaged INTEGER NOT NULL DEFAULT 0,
    external_id TEXT,
    project_id INTEGER NOT NULL DEFAULT 1
);
CREATE UNIQUE INDEX experiments_external ON experiments (external_id) WHERE external_id IS NOT NULL;
CREATE INDEX experiments_project ON experiments (project_id);
CREATE TABLE contexts (experiment_id INTEGER PRIMARY KEY, tgz BLOB NOT NULL);

CREATE TABLE trials (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    experiment_id INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    task_id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    hparams TEXT NOT NULL,
    seed INTEGER NOT NULL,
    created REAL NOT NULL,
    ended REAL,
    run_id INTEGER NOT NULL DEFAULT 0,
    restarts INTEGER NOT NULL DEFAULT 0,
    steps_completed INTEGER NOT NULL DEFAULT 0,
    latest_checkpoint TEXT,
    warm_start_checkpoint TEXT,
    progress REAL,
    runner_state TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '',
    pruned INTEGER NOT NULL DEFAULT 0,
    early_exit TEXT NOT NULL DEFAULT '',
    metadata TEXT NOT NULL DEFAULT '{}',
    log_policy_matched TEXT,
    external_id TEXT,
    last_activity REAL,
    UNIQUE (experiment_id, request_id)
);
CREATE INDEX trials_experiment ON trials (experiment_id, id);
CREATE UNIQUE INDEX trials_external ON trials (experiment_id, external_id) WHERE external_id IS NOT NULL;
CREATE INDEX trials_active ON trials (last_activity) WHERE last_activity IS NOT NULL;

CREATE TABLE allocations (
    id TEXT PRIMARY KEY,
    trial_id INTEGER NOT NULL,
    experiment_id INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    run_id INTEGER NOT NULL,
    state TEXT NOT NULL,
    slots TEXT NOT NULL DEFAULT '[]',
    created REAL NOT NULL,
    resources_id TEXT NOT NULL,
    container_id TEXT NOT NULL,
    started REAL,
    ended REAL,
    exit_code INTEGER,
    preempt INTEGER NOT NULL DEFAULT 0,
    acked INTEGER NOT NULL DEFAULT 0,
    killing INTEGER NOT NULL DEFAULT 0,
    deadline REAL
);
CREATE INDEX allocations_trial ON allocations (trial_id, run_id);
CREATE INDEX allocations_live ON allocations (state) WHERE state != 'TERMINATED';

CREATE TABLE metrics (
    id INTEGER PRIMARY KEY,
    trial_id INTEGER NOT NULL,
    run_id INTEGER NOT NULL,
    grp TEXT NOT NULL,
    steps INTEGER,
    metrics TEXT NOT NULL,
    batch_metrics TEXT,
    reported REAL NOT NULL,
    searcher_metric REAL,
    archived INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX metrics_trial ON metrics (trial_id, grp, archived, steps);
CREATE INDEX metrics_searched ON metrics (trial_id, searcher_metric)
    WHERE searcher_metric IS NOT NULL AND archived = 0;
CREATE INDEX metrics_reported ON metrics (trial_id, grp);
CREATE TABLE summaries (
    trial_id INTEGER NOT NULL,
    grp TEXT NOT NULL,
    newest INTEGER NOT NULL,
    summary TEXT NOT NULL,
    PRIMARY KEY (trial_id, grp)
) WITHOUT ROWID;

CREATE TABLE checkpoints (
    uuid TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    trial_id INTEGER,
    experiment_id INTEGER,
    task_id TEXT NOT NULL,
    allocation_id TEXT NOT NULL,
    reported REAL NOT NULL,
    metadata TEXT NOT NULL,
    resources TEXT NOT NULL,
    size INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    storage_id INTEGER,
    doomed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX checkpoints_trial ON checkpoints (trial_id, steps);
CREATE INDEX checkpoints_experiment ON checkpoints (experiment_id);
CREATE INDEX checkpoints_doomed ON checkpoints (doomed) WHERE doomed = 1;

CREATE TABLE users (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    admin INTEGER NOT NULL,
    active INTEGER NOT NULL,
    password TEXT NOT NULL,
    display_name TEXT NOT NULL DEFAULT ''
);
CREATE TABLE tokens (digest TEXT PRIMARY KEY, user_id INTEGER, allocation_id TEXT, expires REAL);
CREATE INDEX tokens_allocation ON tokens (allocation_id);

CREATE TABLE disabled_slots (number INTEGER PRIMARY KEY, draining INTEGER NOT NULL DEFAULT 0);
CREATE TABLE log_matches (
    task_id TEXT NOT NULL,
    pattern TEXT NOT NULL,
    action TEXT NOT NULL,
    name TEXT NOT NULL,
    line TEXT NOT NULL,
    PRIMARY KEY (task_id, pattern, action, name)
);

CREATE TABLE storages (id INTEGER PRIMARY KEY, section TEXT NOT NULL UNIQUE);

CREATE TABLE models (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    description TEXT NOT NULL,
    notes TEXT NOT NULL,
    metadata TEXT NOT NULL,
    labels TEXT NOT NULL,
    user_id INTEGER NOT NULL,
    workspace_id INTEGER NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    updated REAL NOT NULL
);
CREATE TABLE model_versions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    model_id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    checkpoint_uuid TEXT NOT NULL,
    name TEXT NOT NULL,
    comment TEXT NOT NULL,
    notes TEXT NOT NULL,
    metadata TEXT NOT NULL,
    labels TEXT NOT NULL,
    user_id INTEGER NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    UNIQUE (model_id, version)
);
CREATE INDEX model_versions_checkpoint ON model_versions (checkpoint_uuid);
CREATE TABLE templates (
    name TEXT PRIMARY KEY,
    config TEXT NOT NULL,
    workspace_id INTEGER NOT NULL,
    user_id INTEGER NOT NULL
);

CREATE TABLE workspaces (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    archived INTEGER NOT NULL DEFAULT 0,
    storage TEXT
);
CREATE TABLE projects (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    workspace_id INTEGER NOT NULL,
    name TEXT NOT NULL,
    key TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    description TEXT NOT NULL DEFAULT '',
    archived INTEGER NOT NULL DEFAULT 0,
    notes TEXT NOT NULL DEFAULT '[]',
    UNIQUE (workspace_id, name)
);
INSERT INTO workspaces (id, name, owner) VALUES (1, 'Uncategorized', 'determined');
INSERT INTO projects (id, workspace_id, name, key, owner) VALUES (1, 1, 'Uncategorized', 'UNC', 'determined');
"""


LARGEST_WAL = 8 * 1024 * 1024
"""Bytes to which SQLite truncates the -wal file when it restarts it: twice its usual size."""

_BUSY_SECONDS = 5.0  # how long a connection waits for another program's lock
_FAULTS = {  # SQLite's message -> what happened, whether a disk is full, how to fix it
    "is full": ("the master's disk is full", True, "Free space on it; running trials continue in the meantime."),
    "is locked": ("another program has locked the master's store", False, "Close the program that has the store open."),
    "disk I/O error": ("the master's disk failed", False, "Check the system's log, and repair the disk."),
}
_READERS = 16  # concurrent read connections; SQLite caches up to 2 MiB of pages for each


class Database:
    """The file at ``path``, mode 0600. Readers see the last committed transaction."""

    def __init__(self, path: Path) -> None:
        # SQLite creates its -wal and -shm files with the same mode
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
        self._lock = threading.RLock()
        self._path = path
        self._readers = threading.BoundedSemaphore(_READERS)
        self._idle: list[sqlite3.Connection] = []  # readers
        self._writer = _connect(path)
        if not self._writer.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            self._writer.executescript(f"BEGIN; {_SCHEMA}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        _require_schema(self._writer, path)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction: the block is written completely or not at all. Do not nest.

        Raises Unavailable if the disk is full or another program locks the file.
        """
        with self._lock, self._explained():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite may already have rolled back
                    self._writer.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise Unavailable for SQLite errors that are caused by the disk or by other programs."""
        try:
            yield
        except sqlite3.OperationalError as error:
            for words, (what, full, fix) in _FAULTS.items():
                if words in str(error):
                    raise Unavailable(what, full=full, where=str(self._path), fix=fix) from error
            raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a consistent view for queries without blocking others. Do not nest."""
        with self._readers, self._explained():
            try:
                reader = self._idle.pop()
            except IndexError:
                reader = _connect(self._path)
                reader.execute("PRAGMA query_only = 1")
            reader.execute("BEGIN")
            try:
                yield reader
            finally:
                reader.execute("ROLLBACK")
                self._idle.append(reader)

    def close(self) -> None:
        """Close the file; no data is lost if this is not called."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
            self._writer.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_SECONDS)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {LARGEST_WAL}")
    return connection


def _require_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise ConfigError for a store of another version; it is neither read nor changed."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"this store was written by {'a newer' if version > SCHEMA_VERSION else 'an older'} zero_trial",
            where=str(path),
            got=f"schema {version}",
            expected=f"schema {SCHEMA_VERSION}",
            fix="Use the version that wrote it (see master.log next to it), or another --root.",
        )


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file at ``path`` read-only, with one consistent view, while a master runs or after
    it has stopped.

    Raises ConfigError if there is no file, or another version wrote it.
    """
    if not path.is_file():
        raise ConfigError(
            "master's store not found",
            where=str(path),
            fix="Start one with zero-trial master up, or pass the --root of an existing master.",
        )
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        ) as connection:
            connection.row_factory = sqlite3.Row
            _require_schema(connection, path)
            connection.execute("BEGIN")
            yield connection
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"not a master's store ({error})", where=str(path)) from error


# -- column values


dumps = json.JSONEncoder(separators=(",", ":")).encode  # JSON without blanks
_read_json = json.JSONDecoder().raw_decode


def loads(text: str | None) -> Any:
    """Parse a JSON column written by `dumps`; return None for NULL."""
    return None if text is None else _read_json(text)[0]


def update(connection: sqlite3.Connection, table: str, key: str, value: Any, changes: Mapping[str, Any]) -> None:
    """Set columns of one row. Table, key and columns must be literals, never user input."""
    if not changes:
        return
    columns = ", ".join(f"{name} = ?" for name in changes)
    connection.execute(f"UPDATE {table} SET {columns} WHERE {key} = ?", [*map(plain, changes.values()), value])


def insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any], verb: str = "INSERT") -> int:
    """Insert one row and return its rowid."""
    names = ", ".join(values)
    marks = ", ".join("?" for _ in values)
    cursor = connection.execute(f"{verb} INTO {table} ({names}) VALUES ({marks})", list(map(plain, values.values())))
    return int(cursor.lastrowid or 0)


def drop(connection: sqlite3.Connection, table: str, key: str, value: Any) -> None:
    """Delete the rows with this value. Table and key must be literals, never user input."""
    connection.execute(f"DELETE FROM {table} WHERE {key} = ?", (value,))


def record(kind: Callable[..., T], row: sqlite3.Row, **more: Any) -> T:
    """Build a record from the columns named like its fields, with their types; ``more`` wins."""
    values = {name: read(row[place]) for name, place, read in _fields(kind, tuple(row.keys()))}
    values.update(more)
    return kind(**values)


@cache
def _fields(kind: Callable[..., Any], columns: tuple[str, ...]) -> tuple[tuple[str, int, Callable[[Any], Any]], ...]:
    """Return the fields of a record that are columns, each with column index and converter."""
    hints = get_type_hints(kind)
    return tuple((name, columns.index(name), _reader(hint)) for name, hint in hints.items() if name in columns)


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return the function that converts a column's value to this type."""
    if hint is bool or (isinstance(hint, type) and issubclass(hint, Enum)):
        return hint
    if get_origin(hint) is tuple:
        return lambda text: tuple(loads(text))
    return loads if Mapping in (get_origin(hint), *map(get_origin, get_args(hint))) else lambda value: value


def plain(value: Any) -> Any:
    """Convert a value to a type that SQLite supports."""
    if isinstance(value, (dict, list, tuple, Mapping)):
        return dumps(value)
    if isinstance(value, str):
        return str(getattr(value, "value", value))  # for an enum, its value
    return value
