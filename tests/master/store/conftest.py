"""A store of a test's own, in one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_trial.master.store import Database


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    database = Database(tmp_path / "db")
    with database.transaction() as opened:
        yield opened
    database.close()
