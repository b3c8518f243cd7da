"""A master in a known state: two experiments, each with a trial that runs on one slot. Nothing is
faked but the agent and the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.master.fakes import Sandbox
from tests.support.archive import tgz
from zero_trial.master import logs
from zero_trial.master.agent.resources import Node
from zero_trial.master.core.accounts import digest
from zero_trial.master.records import (
    Allocation,
    AllocationState,
    Checkpoint,
    CheckpointState,
    Experiment,
    ExperimentState,
    MetricReport,
    NewExperiment,
    Trial,
    TrialState,
)
from zero_trial.master.store import checkpoint_rows, metric_rows, user_rows
from zero_trial.master.store.database import drop

CONFIG = {
    "name": "example",
    "entrypoint": "python3 train.py",
    "hyperparameters": {"global_batch_size": 8, "lr": {"type": "const", "val": 0.1}},
    "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True},
    "resources": {"slots_per_trial": 1},
}
UUID = "6f1c8d2e-0000-4000-8000-0123456789ab"
USER_TOKEN = "user-token"
TASK_TOKEN = "task-token"
OTHER_TASK_TOKEN = "other-task-token"
BEGAN = 1_700_000_000.0


class World(Sandbox):
    """Trials 1 and 2 of experiments 1 and 2: tasks task-N, allocations task-N.1, resources-N,
    container-N, jobs job-N; user 1 owns both."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, nodes=[Node("laptop", 2)])
        self.clock.now = BEGAN
        self.add_user("determined", USER_TOKEN, admin=True)
        for number, token in ((1, TASK_TOKEN), (2, OTHER_TASK_TOKEN)):
            self.create(**CONFIG, owner="determined", context={"model_def.py": f"context of {number}".encode()})
            run = self.run_of(number)
            self.on_started(run.allocation.id)
            self._name(number, run.allocation.id, token)

    def _name(self, number: int, old: str, token: str) -> None:
        """Give what the core names at random the names that the tests ask for."""
        task, name = f"task-{number}", f"task-{number}.1"
        with self.state.database.transaction() as connection:
            connection.execute("UPDATE experiments SET job_id = ? WHERE id = ?", (f"job-{number}", number))
            connection.execute("UPDATE trials SET task_id = ? WHERE id = ?", (task, number))
            connection.execute(
                "UPDATE allocations SET id = ?, task_id = ?, resources_id = ?, container_id = ? WHERE trial_id = ?",
                (name, task, f"resources-{number}", f"container-{number}", number),
            )
            drop(connection, "tokens", "allocation_id", old)
            user_rows.add_token(connection, digest(token), allocation_id=name)
        order = self.agent.running.pop(old)
        renamed = self.tasks.allocation(name)
        self.agent.running[name] = replace(order, allocation=renamed)

    def submit(self, project_id: int = 1, **config: Any) -> Experiment:
        """Submit one more experiment, with changes of its configuration; its owner is user 1."""
        text = yaml.safe_dump({**CONFIG, **config})
        new = NewExperiment(text, tgz({}), "determined", project_id=project_id)
        return self.experiments.create(new).experiment

    def add_unmanaged(self, external_id: str | None = None, **config: Any) -> int:
        """An experiment to which processes report that the master has not started; its id."""
        text = yaml.safe_dump({"searcher": {"name": "single", "metric": "validation_loss"}, **config})
        new = NewExperiment(text, b"", "determined", unmanaged=True, external_id=external_id)
        return self.experiments.create(new).experiment.id

    def change_trial(self, number: int, **columns: Any) -> None:
        from zero_trial.master.store import trial_rows

        with self.state.database.transaction() as connection:
            trial_rows.change(connection, number, **columns)

    def change_experiment(self, number: int, **columns: Any) -> None:
        from zero_trial.master.store import experiment_rows

        with self.state.database.transaction() as connection:
            experiment_rows.change(connection, number, **columns)

    def report(
        self, trial_id: int, group: str, steps: int | None, values: Mapping[str, Any], at: float = BEGAN
    ) -> None:
        """A stored report; the search is not told."""
        number = metric_rows.number_of(values, "validation_loss") if group == "validation" else None
        with self.state.database.transaction() as connection:
            metric_rows.add(connection, MetricReport(trial_id, 1, group, steps, values, reported=at), number)

    def save(self, uuid: str, trial_id: int = 1, **changes: Any) -> None:
        """A stored checkpoint without files."""
        with self.state.database.transaction() as connection:
            checkpoint_rows.put(connection, checkpoint(uuid, trial_id, trial_id, **changes))

    def write(self, trial_id: int, *lines: str | Mapping[str, Any], run_id: int = 1) -> None:
        """Lines of a run's output, or of the master's own (run 0): a text, or m, s, r, l and t of
        an entry."""
        entries = []
        for line in lines:
            entry: dict[str, Any] = {"m": line} if isinstance(line, str) else dict(line)
            text, at = entry.pop("m"), entry.pop("t", BEGAN + 4)
            entries.append(logs.entry(text, at, entry.pop("s", "stdout"), **entry))
        logs.append(logs.path_of(self.directory.trial_logs(trial_id), run_id), entries)

    def content(self) -> list[tuple[Any, ...]]:
        """Every row of the store but the tokens: equal before and after what must change
        nothing."""
        with self.state.database.reading() as connection:
            tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return [
                (table, *row)
                for table in sorted(tables)
                if table != "tokens"
                for row in connection.execute(f"SELECT * FROM {table}").fetchall()
            ]


def experiment(number: int, **changes: Any) -> Experiment:
    """A record by itself, for what renders one."""
    record = Experiment(
        id=number,
        state=ExperimentState.ACTIVE,
        config=CONFIG,
        original_config="name: example\n",
        owner="determined",
        job_id=f"job-{number}",
        created=BEGAN,
        name="example",
        shown_state="RUNNING",
        num_trials=1,
    )
    return replace(record, **changes)


def trial(number: int, experiment_id: int, **changes: Any) -> Trial:
    record = Trial(
        id=number,
        experiment_id=experiment_id,
        request_id=f"r{number}",
        task_id=f"task-{number}",
        state=TrialState.ACTIVE,
        hparams={"lr": 0.1},
        seed=1,
        created=BEGAN + 1,
        run_id=1,
        shown_state="RUNNING",
    )
    return replace(record, **changes)


def allocation(trial_id: int, experiment_id: int) -> Allocation:
    return Allocation(
        id=f"task-{trial_id}.1",
        trial_id=trial_id,
        experiment_id=experiment_id,
        task_id=f"task-{trial_id}",
        run_id=1,
        state=AllocationState.RUNNING,
        slots=(0,),
        created=BEGAN + 1,
        resources_id=f"resources-{trial_id}",
        container_id=f"container-{trial_id}",
        started=BEGAN + 2,
    )


def checkpoint(uuid: str, trial_id: int, experiment_id: int, **changes: Any) -> Checkpoint:
    record = Checkpoint(
        uuid=uuid,
        state=CheckpointState.COMPLETED,
        trial_id=trial_id,
        experiment_id=experiment_id,
        task_id=f"task-{trial_id}",
        allocation_id=f"task-{trial_id}.1",
        reported=BEGAN + 10,
        metadata={"steps_completed": 5},
        resources={"state.json": 11},
        size=11,
        steps_completed=5,
        hparams={"lr": 0.1},
        experiment_config=CONFIG,
        validation_metrics={"validation_loss": 0.5},
        searcher_metric=0.5,
    )
    return replace(record, **changes)
