"""The store for those who only look."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.master.store import Database
from zero_trial.master.store.database import reading


def test_it_sees_what_was_committed_and_cannot_write(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as writer:
        writer.execute("INSERT INTO meta VALUES ('a', '1')")
    with reading(tmp_path / "db") as connection:
        assert connection.execute("SELECT value FROM meta").fetchone()["value"] == "1"
        with pytest.raises(sqlite3.OperationalError):
            connection.execute("INSERT INTO meta VALUES ('b', '1')")
    database.close()


def test_one_view_while_a_master_writes(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with reading(tmp_path / "db") as connection:
        assert connection.execute("SELECT count(*) FROM meta").fetchone()[0] == 0
        with database.transaction() as writer:
            writer.execute("INSERT INTO meta VALUES ('a', '1')")
        assert connection.execute("SELECT count(*) FROM meta").fetchone()[0] == 0
    database.close()


def test_files_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no master's store"), reading(tmp_path / "none"):
        pass
    (tmp_path / "text").write_text("hello, this is not a database at all " * 100)
    with pytest.raises(ConfigError, match="no master's store"), reading(tmp_path / "text"):
        pass
    sqlite3.connect(tmp_path / "empty").close()
    with pytest.raises(ConfigError, match="another release"), reading(tmp_path / "empty"):
        pass
