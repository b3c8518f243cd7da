"""The master's SQLite file: opened with one writer and one reader, brought to the newest schema, and safe against a killed process.

WAL with ``synchronous = NORMAL``: what a returned transaction wrote outlives the process (``kill -9`` included); after a power cut the newest
transactions may be missing, but never a part of one.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_trial.errors import ConfigError
from zero_trial.master.store.schema import MIGRATIONS


class Database:
    """The file at ``path``, mode 0600. Transactions are serial; reads see the last transaction that was committed."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its -wal and -shm files the same mode
        path.chmod(0o600)
        self._lock = threading.RLock()
        self._read_lock = threading.Lock()
        self._writer = _connect(path)
        _migrate(self._writer, path)
        self._reader = _connect(path)
        self._reader.execute("PRAGMA query_only = 1")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything inside happens, or nothing of it if it raises. Not to be nested."""
        with self._lock:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view for several queries, without holding up writers."""
        with self._read_lock:
            self._reader.execute("BEGIN")
            try:
                yield self._reader
            finally:
                self._reader.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file; nothing is lost without it."""
        with self._lock, self._read_lock:
            self._reader.close()
            self._writer.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Take the steps that the file has not taken yet, each as one transaction with its number."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise ConfigError(
            "this store was written by a newer zero_trial",
            where=str(path),
            got=f"schema {version}",
            expected=f"schema {len(MIGRATIONS)} or older",
            fix="Use that version, or another --root.",
        )
    for number in range(version, len(MIGRATIONS)):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]}; PRAGMA user_version = {number + 1}; COMMIT;")
