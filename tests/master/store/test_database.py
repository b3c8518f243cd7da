"""The file of the store: schema, transactions, read-only opening, values of columns."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.master.store import Database
from zero_trial.master.store.database import LARGEST_WAL, SCHEMA_VERSION, reading

WRITER = """
import sys
from pathlib import Path
from zero_trial.master.store import Database
database = Database(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    with database.transaction() as connection:
        connection.execute("INSERT INTO meta VALUES (?, ?)", (f"a{number}", "x"))
        connection.execute("INSERT INTO meta VALUES (?, ?)", (f"b{number}", "x"))
    print(number, flush=True)
"""


def test_what_was_committed_is_read_and_what_failed_is_not(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        connection.execute("INSERT INTO meta VALUES ('a', '1')")
    with pytest.raises(RuntimeError), database.transaction() as connection:
        connection.execute("INSERT INTO meta VALUES ('b', '1')")
        raise RuntimeError
    with database.reading() as connection:
        assert [row[0] for row in connection.execute("SELECT key FROM meta")] == ["a"]
    database.close()


def test_a_large_transaction_leaves_no_large_wal_and_no_reader_holds_up_the_writer(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    wal = tmp_path / "db-wal"
    with database.reading() as reader:
        reader.execute("SELECT count(*) FROM meta").fetchone()
        with database.transaction() as connection:
            connection.execute("INSERT INTO contexts VALUES (2, zeroblob(?))", (2 * LARGEST_WAL,))
    assert wal.stat().st_size > LARGEST_WAL
    for number in range(2):  # the first one copies the log into the file, the second one begins it again
        with database.transaction() as connection:
            connection.execute("INSERT INTO meta VALUES (?, '1')", (number,))
    assert wal.stat().st_size <= LARGEST_WAL
    database.close()


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        connection.execute("INSERT INTO meta VALUES ('a', '1')")
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    database.close()


def test_a_reader_does_not_see_a_transaction_that_is_open_and_cannot_write(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as writer, database.reading() as reader:
        writer.execute("INSERT INTO meta VALUES ('a', '1')")
        assert reader.execute("SELECT count(*) FROM meta").fetchone()[0] == 0
        with pytest.raises(sqlite3.OperationalError):
            reader.execute("INSERT INTO meta VALUES ('b', '1')")
    database.close()


@pytest.mark.parametrize(("version", "said"), [(SCHEMA_VERSION - 1, "an older"), (SCHEMA_VERSION + 1, "a newer")])
def test_the_store_of_another_version_is_refused_and_stays_as_it_is(tmp_path: Path, version: int, said: str) -> None:
    """Its own master may be running: it goes on writing to the same tables."""
    path = tmp_path / "db"
    Database(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {version}")
        before = list(other.iterdump())
        with pytest.raises(ConfigError, match=f"{said} zero_trial.*schema {version}"):
            Database(path)
        with pytest.raises(ConfigError, match=f"{said} zero_trial.*schema {version}"), reading(path):
            pass
        assert list(other.iterdump()) == before


def test_kill_9_loses_no_commit_and_leaves_no_half(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "db")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 200:
            break
    os.kill(child.pid, signal.SIGKILL)
    # what it had printed before it died
    said = [line for line in child.stdout if line.endswith("\n")]
    child.wait(timeout=30)
    last = int(said[-1]) if said else 200
    database = Database(tmp_path / "db")
    with database.reading() as connection:
        keys = {row[0] for row in connection.execute("SELECT key FROM meta")}
    database.close()
    assert {f"a{number}" for number in range(1, last + 1)} <= keys
    assert {key[1:] for key in keys if key[0] == "a"} == {key[1:] for key in keys if key[0] == "b"}


def test_files_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="master's store"), reading(tmp_path / "none"):
        pass
    (tmp_path / "text").write_text("hello, this is not a database at all " * 100)
    with pytest.raises(ConfigError, match="master's store"), reading(tmp_path / "text"):
        pass
    sqlite3.connect(tmp_path / "empty").close()
    with pytest.raises(ConfigError, match="an older"), reading(tmp_path / "empty"):
        pass
