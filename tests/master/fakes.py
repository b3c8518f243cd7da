"""A master without processes: the real core on a directory of its own, an agent that only
remembers, and a clock that is moved by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.support.archive import tgz
from zero_trial.master.agent.environment import StartOrder
from zero_trial.master.agent.resources import Exit, Node, Reports
from zero_trial.master.core import Master
from zero_trial.master.core.accounts import digest
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import Experiment, NewExperiment, User
from zero_trial.master.store import user_rows


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeAgent:
    """Remembers its orders. ``running``: allocations whose processes are there, by id, also for the
    next master."""

    def __init__(self, *machines: Node) -> None:
        self.machines = machines
        self.running: dict[str, StartOrder] = {}
        self.killed: list[str] = []
        self.started: list[str] = []

    def nodes(self) -> tuple[Node, ...]:
        return self.machines

    def pools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pool for node in self.machines for pool in node.pools))

    def check(self, config: Mapping[str, Any]) -> None: ...

    def begin(self, reports: Reports) -> None: ...

    def start(self, order: StartOrder) -> None:
        if order.allocation.id not in self.running:
            self.running[order.allocation.id] = order
            self.started.append(order.allocation.id)

    def kill(self, allocation_id: str) -> None:
        self.killed.append(allocation_id)

    def adopt(self, allocation_id: str) -> bool:
        return allocation_id in self.running

    def close(self) -> None: ...


class Sandbox(Master):
    """A master whose trials are moved by hand; ``restart`` is a crash followed by a new master on
    the same directory."""

    def __init__(self, root: Path, slots: int = 2, *, nodes: Sequence[Node] = ()) -> None:
        self.directory = MasterDirectory(root)
        self.directory.prepare()
        self.clock = Clock()
        self.agent = FakeAgent(*(nodes or [Node("this-machine", slots)]))
        self.open()

    def open(self) -> None:
        super().__init__(self.directory, self.agent, clock=self.clock)
        self.take_over("http://127.0.0.1:1")

    def restart(self) -> None:
        self.close()
        self.open()

    def create(self, **config: Any) -> Experiment:
        activate, owner = config.pop("activate", True), config.pop("owner", "someone")
        context = config.pop("context", {"model_def.py": b"pass"})
        new = NewExperiment(yaml.safe_dump(experiment(**config)), tgz(context), owner, activate=activate)
        return self.experiments.create(new).experiment

    def add_user(self, name: str, token: str = "", *, admin: bool = False, active: bool = True) -> User:
        """Add a user without a password, and perhaps with a token that does not expire."""
        user = User(0, name, admin, active, password="")
        with self.state.database.transaction() as connection:
            user = replace(user, id=user_rows.add_user(connection, user))
            if token:
                user_rows.add_token(connection, digest(token), user_id=user.id)
        return user

    def set_user(self, number: int, **columns: Any) -> None:
        with self.state.database.transaction() as connection:
            user_rows.change_user(connection, number, **columns)

    def runs(self) -> list[StartOrder]:
        """What runs now, oldest first."""
        return list(self.agent.running.values())

    def run_of(self, trial_id: int) -> StartOrder:
        return next(order for order in self.runs() if order.allocation.trial_id == trial_id)

    def exit(self, trial_id: int, code: int = 0, why: str = "") -> None:
        """The processes of a trial end."""
        name = self.run_of(trial_id).allocation.id
        self.on_exited(name, Exit(code, self.clock.now, why=why))
        del self.agent.running[name]

    def validate(self, trial_id: int, metric: float, batches: int = 1) -> None:
        run = self.run_of(trial_id).allocation.run_id
        metrics = {"val": metric, "batches": batches}
        self.trials.report_metrics(trial_id, run_id=run, group="validation", steps_completed=batches, metrics=metrics)

    def ack(self, trial_id: int) -> None:
        self.tasks.ack_preemption(self.run_of(trial_id).allocation.id)

    def state_of(self, trial_id: int) -> str:
        return self.trials.get(trial_id).state.value

    def states(self, experiment_id: int) -> tuple[str, list[str]]:
        """The experiment's state and those of its trials."""
        found = self.experiments
        return found.get(experiment_id).state.value, [trial.state.value for trial in found.trials(experiment_id)]


def experiment(**changes: Any) -> dict[str, Any]:
    """A small configuration."""
    config: dict[str, Any] = {
        "name": "test",
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "val", "smaller_is_better": True},
        "hyperparameters": {"a": 1},
        "resources": {"slots_per_trial": 1},
        "max_restarts": 1,
        "reproducibility": {"experiment_seed": 7},
    }
    config.update(changes)
    return config
