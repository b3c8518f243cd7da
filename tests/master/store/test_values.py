"""Values on their way into columns and out of them."""

from __future__ import annotations

from pathlib import Path

from zero_trial.master.records import TrialState
from zero_trial.master.store import Database
from zero_trial.master.store.database import dumps, insert, loads, plain, update


def test_json_there_and_back() -> None:
    assert loads(dumps({"a": [1, 2.5, None, "ü"]})) == {"a": [1, 2.5, None, "ü"]}
    assert loads(None) is None


def test_what_sqlite_is_given() -> None:
    assert [plain(value) for value in (TrialState.ERROR, (1, 2), {"a": 1}, None, 2.5, "x")] == [
        "ERROR",
        "[1,2]",
        '{"a":1}',
        None,
        2.5,
        "x",
    ]


def test_rows_are_inserted_and_changed(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        insert(connection, "meta", {"key": "k", "value": "v'; DROP TABLE meta; --"})
        update(connection, "meta", "key", "k", {})
        assert connection.execute("SELECT value FROM meta").fetchone()[0] == "v'; DROP TABLE meta; --"
        update(connection, "meta", "key", "k", {"value": "w"})
        assert connection.execute("SELECT value FROM meta").fetchone()[0] == "w"
    database.close()
