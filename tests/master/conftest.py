"""Fixtures of the master's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.master.fakes import Sandbox


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Sandbox]:
    """A master with two slots whose trials are moved by hand."""
    made = Sandbox(tmp_path / "root")
    yield made
    made.close()
