"""The master is killed at every point of a search: before and after each commit. The search decides
as if nothing had happened."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.master.fakes import Sandbox
from zero_trial.master.store import Database

SEARCHES: dict[str, dict[str, Any]] = {
    "single": {
        "searcher": {"name": "single", "metric": "val"},
        "hyperparameters": {"a": 1},
    },
    "random": {
        "searcher": {"name": "random", "metric": "val", "max_trials": 4, "max_concurrent_trials": 2},
        "hyperparameters": {"a": {"type": "double", "minval": 0, "maxval": 1}},
    },
    "grid": {
        "searcher": {"name": "grid", "metric": "val", "max_concurrent_trials": 3},
        "hyperparameters": {"a": {"type": "categorical", "vals": [1, 2, 3, 4]}},
    },
    "asha": {
        "searcher": {
            "name": "adaptive_asha",
            "metric": "val",
            "max_trials": 5,
            "max_time": 4,
            "time_metric": "batches",
            "divisor": 2,
            "max_concurrent_trials": 2,
        },
        "hyperparameters": {"a": {"type": "double", "minval": 0, "maxval": 1}},
    },
}


class Crash(BaseException):
    """The process is gone: no one catches it."""


class Fuse:
    """Raises Crash once, at the given commit, before or after it."""

    def __init__(self, at: int, after: bool) -> None:
        self.left = at
        self.after = after
        self.commits = 0

    @contextmanager
    def transaction(self, whole: Callable[[], Any]) -> Iterator[sqlite3.Connection]:
        self.commits += 1
        self.left -= 1
        blows = self.left == 0
        with whole() as connection:
            yield connection
            if blows and not self.after:
                raise Crash
        if blows:
            raise Crash


class World:
    """Trials that always do the same: validate thrice, crash once if they are the second, end;
    whatever the master forgets they say again."""

    def __init__(self, root: Path, search: dict[str, Any], fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = Database.transaction
        monkeypatch.setattr(Database, "transaction", lambda database: fuse.transaction(lambda: plain(database)))
        self.search = search
        self.root = root
        self.master = self.safely(lambda: Sandbox(root))
        self.steps: dict[str, int] = {}  # by allocation

    def safely(self, work: Callable[[], Any]) -> Any:
        """Do something; after a crash a new master does it again."""
        try:
            return work()
        except Crash:
            if hasattr(self, "master"):
                workers = self.master.agent
                self.master.state.database.close()
                self.master.open()
                assert self.master.agent is workers
            return work()

    def run(self) -> dict[str, Any]:
        if not self.safely(
            lambda: list(self.master.experiments.all()) or self.master.create(**self.search, max_restarts=1)
        ):
            raise AssertionError("nothing was created")
        for _ in range(200):
            runs = self.master.runs()
            if not runs:
                break
            self.advance(runs[0])
        return self.outcome()

    def advance(self, order: Any) -> None:
        run, master = order.allocation, self.master
        step = self.steps[run.id] = self.steps.get(run.id, 0) + 1
        with master.state.database.reading() as connection:
            preempt = connection.execute("SELECT preempt FROM allocations WHERE id = ?", (run.id,)).fetchone()[0]
        if run.trial_id == 2 and run.run_id == 1 and step == 2:
            self.safely(lambda: self.leave(run.trial_id, 1))
        elif preempt:
            self.safely(lambda: self.master.tasks.ack_preemption(run.id))
            self.safely(lambda: self.leave(run.trial_id, 0))
        elif step <= 4:
            metric = (float(order.hparams["a"]) * 7.3 + step) % 5
            self.safely(lambda: self.master.validate(run.trial_id, metric, batches=step))
        else:
            self.safely(lambda: self.leave(run.trial_id, 0))

    def leave(self, trial_id: int, code: int) -> None:
        """The watch says it until it is heard, and once more after a restart."""
        if any(order.allocation.trial_id == trial_id for order in self.master.runs()):
            self.master.exit(trial_id, code)

    def outcome(self) -> dict[str, Any]:
        found = self.master.experiments
        return {
            "state": found.get(1).state.value,
            "trials": [
                (trial.request_id, trial.hparams, trial.seed, trial.state.value, trial.run_id, trial.restarts)
                for trial in found.trials(1)
            ],
            "started": [name.rpartition(".")[2] for name in self.master.agent.started],
            "validations": [len(list(self.master.trials.metrics(trial.id))) for trial in found.trials(1)],
        }


def play(root: Path, search: str, at: int, after: bool) -> tuple[dict[str, Any], int]:
    """One search to its end with one crash; returns what came of it and how many commits there
    were."""
    with pytest.MonkeyPatch.context() as patch:
        fuse = Fuse(at, after)
        world = World(root, SEARCHES[search], fuse, patch)
        try:
            return world.run(), fuse.commits
        finally:
            world.master.close()


@pytest.mark.parametrize("search", SEARCHES)
def test_the_same_decisions_wherever_the_master_is_killed(tmp_path: Path, search: str) -> None:
    expected, commits = play(tmp_path / "whole", search, at=-1, after=True)
    assert expected["state"] == "COMPLETED"
    for at in range(3, commits + 1):  # the first two make the store itself
        after = at % 2 == 0
        outcome, _ = play(tmp_path / str(at), search, at, after)
        assert outcome == expected, f"killed {'after' if after else 'before'} commit {at}"
