"""Fixtures of the master's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.master.det import Det
from tests.master.engines import ENGINES
from tests.master.fakes import Sandbox
from tests.master.world import World


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Sandbox]:
    """A master with two slots whose trials are moved by hand."""
    made = Sandbox(tmp_path / "root")
    yield made
    made.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A master in a known state."""
    made = World(tmp_path / "root")
    yield made
    made.close()


@pytest.fixture(scope="session")
def master_options(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ...]]:
    """Options of a master with four slots: those of this machine or, with ``--on``, of a real
    cluster."""
    name = request.config.getoption("--on")
    if name is None:
        yield Det.options
        return
    with ENGINES[name](tmp_path_factory.mktemp(name)) as cluster:
        yield ("--on", cluster.on, "--cpu")
