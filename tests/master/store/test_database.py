"""The store: its file and transactions, and the rows of experiments, trials and checkpoints."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.master.records import (
    Checkpoint,
    CheckpointState,
    Experiment,
    ExperimentState,
    MetricReport,
    Trial,
    TrialState,
)
from zero_trial.master.store import Database, checkpoint_rows, experiment_rows, metric_rows, trial_rows
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


def put(connection: sqlite3.Connection, **changes: Any) -> int:
    config = {"searcher": {"metric": "val", "smaller_is_better": changes.pop("smaller", True)}}
    values: dict[str, Any] = {
        "id": 0,
        "state": ExperimentState.ACTIVE,
        "config": config,
        "original_config": "x: 1",
        "owner": "ada",
    }
    values |= {"job_id": "j", "created": 1.0, "name": "n", "labels": ("a", "b")} | changes
    return experiment_rows.add(connection, Experiment(**values), b"tgz")


def put_trial(connection: sqlite3.Connection, experiment_id: int, name: str, value: float | None = None) -> int:
    number = trial_rows.add(
        connection, Trial(0, experiment_id, name, f"{experiment_id}.{name}", TrialState.ACTIVE, {}, 1, 2.0)
    )
    if value is not None:
        metric_rows.add(connection, MetricReport(number, 1, "validation", 1, {"val": value}), value)
    return number


@pytest.mark.parametrize(("smaller", "best"), [(True, (2, 0.1)), (False, (1, 0.9))])
def test_the_best_trial(connection: sqlite3.Connection, smaller: bool, best: tuple[int, float]) -> None:
    number = put(connection, smaller=smaller)
    for name, value in (("a", 0.9), ("b", 0.1), ("c", None)):
        put_trial(connection, number, name, value)
    found = experiment_rows.get(connection, number)
    assert found is not None and (found.best_trial_id, found.best_metric) == best and found.num_trials == 3


def test_nothing_is_left_of_one_that_is_erased(connection: sqlite3.Connection) -> None:
    first, second = put(connection), put(connection)
    put_trial(connection, first, "a", 1.0)
    kept = put_trial(connection, second, "b", 1.0)
    experiment_rows.erase(connection, first)
    assert experiment_rows.get(connection, first) is None and experiment_rows.context(connection, first) is None
    assert trial_rows.of_experiment(connection, first) == []
    for table in ("metrics", "summaries"):
        assert [row[0] for row in connection.execute(f"SELECT DISTINCT trial_id FROM {table}")] == [kept]
    assert put(connection) > second  # numbers are not used again


def saved(name: str, trial_id: int, steps: int, at: float) -> Checkpoint:
    return Checkpoint(
        name, CheckpointState.COMPLETED, trial_id, 1, "t", "t.1", at, {"steps_completed": steps}, {"w": 3}, 3, steps
    )


def test_checkpoints(connection: sqlite3.Connection) -> None:
    experiment = put(connection)
    trial = put_trial(connection, experiment, "a", 0.5)
    for name, steps, at in (("one", 1, 1.0), ("two", 2, 2.0), ("late", 1, 3.0)):
        checkpoint_rows.put(connection, saved(name, trial, steps, at))
    checkpoint_rows.put(connection, saved("two", trial, 2, 2.0))  # said twice
    assert [item.uuid for item in checkpoint_rows.of_trial(connection, trial)] == ["one", "late", "two"]
    assert [item.uuid for item in checkpoint_rows.of_experiment(connection, experiment)] == ["one", "two", "late"]
    newest = checkpoint_rows.latest(connection, trial)
    assert newest is not None and newest.uuid == "late"  # a run that went back wrote it last
    found = checkpoint_rows.get(connection, "one")
    assert found is not None and found.searcher_metric == 0.5 and found.validation_metrics == {"val": 0.5}
    checkpoint_rows.mark_deleted(connection, ["late", "no one"])
    assert [item.uuid for item in checkpoint_rows.marked_deleted(connection)] == ["late"]
    newest = checkpoint_rows.latest(connection, trial)
    assert newest is not None and newest.uuid == "two"
    checkpoint_rows.change(connection, "late", state=CheckpointState.DELETED, doomed=0)
    checkpoint_rows.mark_deleted(connection, ["late"])
    assert checkpoint_rows.marked_deleted(connection) == []
    assert checkpoint_rows.get(connection, "no one") is None
