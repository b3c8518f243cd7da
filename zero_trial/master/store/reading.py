"""The store for those who only look: opened so that nothing can be written, while a master works or after it has gone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from zero_trial.errors import ConfigError
from zero_trial.master.store.schema import MIGRATIONS


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One consistent view of the file at ``path``. Raises ConfigError if there is none, or it is another release's."""
    if not path.is_file():
        raise ConfigError("there is no master's store", where=str(path), fix="Start one with zero-trial master up.")
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        ) as connection:
            connection.row_factory = sqlite3.Row
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != len(MIGRATIONS):
                raise ConfigError(
                    "this store is of another release",
                    where=str(path),
                    got=f"schema {version}",
                    expected=f"schema {len(MIGRATIONS)}",
                    fix="zero-trial master up brings an older one up to date.",
                )
            connection.execute("BEGIN")
            yield connection
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"this is no master's store ({error})", where=str(path)) from error
