"""Runs and a master's store to read, a board for each behind its own server, and a browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.master.fakes import Sandbox
from tests.report import samples
from tests.report.browser import Browser
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.http import listen
from zero_trial.report import board_address
from zero_trial.report.board import board_routes, serve_runs
from zero_trial.report.master_reader import StoreSource, from_master_store
from zero_trial.report.report_data import RunReport, SweepReport
from zero_trial.report.run_reader import from_run_folder

TOKEN = "user-token"


@contextmanager
def served_runs(folder: Path) -> Iterator[str]:
    """Serve a folder of runs; the address has the token in it."""
    stop, addresses = threading.Event(), SimpleQueue[str]()
    thread = threading.Thread(target=serve_runs, args=(folder, 0, addresses.put, stop))
    thread.start()
    try:
        yield addresses.get(timeout=30)
    finally:
        stop.set()
        thread.join(timeout=30)


@contextmanager
def served_master(directory: MasterDirectory) -> Iterator[str]:
    """Serve a store under a master."""
    master = Sandbox(directory.root)
    master.add_user("determined", TOKEN, admin=True)
    try:
        with listen(master, more=board_routes(StoreSource(directory))) as server:
            yield board_address(server.url, TOKEN)
    finally:
        master.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample runs, which no test changes."""
    return samples.runs(tmp_path_factory.mktemp("report") / "runs")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> MasterDirectory:
    """The sample store, which no test changes."""
    return samples.store(tmp_path_factory.mktemp("report") / "master")


@pytest.fixture(scope="session")
def run(runs: Path) -> RunReport:
    """A run that has ended."""
    return from_run_folder(runs / "0001")


@pytest.fixture(scope="session")
def sweep(store: MasterDirectory) -> SweepReport:
    """A search that has ended."""
    return from_master_store(store.database, 1)


@pytest.fixture(scope="session")
def runs_board(runs: Path) -> Iterator[str]:
    with served_runs(runs) as address:
        yield address


@pytest.fixture(scope="session")
def master_board(store: MasterDirectory) -> Iterator[str]:
    with served_master(store) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with closing(Browser(tmp_path_factory.mktemp("browser"))) as made:
        yield made
