"""A board for runs and one under a master, each behind its own server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.master.fakes import Sandbox
from tests.report.board import samples
from zero_trial.master.http import listen
from zero_trial.report.board import board_address
from zero_trial.report.board.board_app import board_routes, serve_runs
from zero_trial.report.board.board_source import StoreSource

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
def served_master(root: Path) -> Iterator[str]:
    """Serve the sample store under a master."""
    directory = samples.store(root)
    master = Sandbox(root)
    master.add_user("determined", TOKEN, admin=True)
    try:
        with listen(master, more=board_routes(StoreSource(directory))) as server:
            yield board_address(server.url, TOKEN)
    finally:
        master.close()


@pytest.fixture(scope="module")
def runs_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_runs(samples.runs(tmp_path_factory.mktemp("board") / "runs")) as address:
        yield address


@pytest.fixture(scope="module")
def master_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_master(tmp_path_factory.mktemp("board") / "master") as address:
        yield address
