"""Experiments: create, run, change, delete."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.master.core.test_checkpoints import base, save
from tests.master.fakes import Sandbox, experiment
from tests.support.archive import tgz
from zero_trial.master import logs
from zero_trial.master.agent.resources import Node
from zero_trial.master.core import experiments as service
from zero_trial.master.logs import LogMatch, LogPolicy, LogQuery
from zero_trial.master.records import (
    Conflict,
    ExperimentPatch,
    GcPolicy,
    Invalid,
    NewExperiment,
    NotFound,
    TrialState,
    Unsupported,
)
from zero_trial.master.search import pruning
from zero_trial.master.store import experiment_rows

TWO = {"searcher": {"name": "grid", "metric": "val"}, "hyperparameters": {"a": {"type": "categorical", "vals": [1, 2]}}}


def new(**config: Any) -> NewExperiment:
    return NewExperiment(yaml.safe_dump(experiment(**config)), tgz({}), "ada")


class TestCreate:
    def test_what_was_submitted_is_kept(self, master: Sandbox) -> None:
        made = master.create(description="d", labels=["x"])
        assert (made.id, made.name, made.description, made.labels, made.owner) == (1, "test", "d", ("x",), "someone")
        assert "max_restarts: 1" in made.original_config and made.config["max_restarts"] == 1
        assert made.config["checkpoint_storage"]["host_path"] == str(master.directory.storage)
        assert master.experiments.context(1) == master.tasks.context(master.runs()[0].allocation.task_id)

    def test_it_reads_no_other_experiment(self, master: Sandbox) -> None:
        """A hundred that have ended are no more work than one: SQLite's own steps are counted."""
        database, steps = master.state.database, 0

        def count() -> None:
            nonlocal steps
            steps += 1

        def work() -> int:
            nonlocal steps
            steps = 0
            made = master.create(max_restarts=0)
            found = steps
            master.experiments.kill(made.id)
            return found

        with database.transaction() as writer, database.reading() as reader:
            for connection in (writer, reader):
                connection.set_progress_handler(count, 20)
        first = [work() for _ in range(3)][-1]
        with database.transaction() as connection:
            columns = [row["name"] for row in connection.execute("PRAGMA table_info(experiments)")]
            others = ", ".join(name for name in columns if name != "id")
            for _ in range(100):
                connection.execute(f"INSERT INTO experiments ({others}) SELECT {others} FROM experiments WHERE id = 1")
        assert work() <= first + 3

    @pytest.mark.parametrize(
        ("wanted", "second", "refused"),
        [
            ({"slots_per_trial": 4}, {}, False),
            ({"slots_per_trial": 4}, {"up": False}, False),  # it may come back
            ({"slots_per_trial": 4}, {"up": False, "pools": ()}, True),  # it never will
            ({"slots_per_trial": 4, "is_single_node": True}, {}, True),
            ({"slots_per_trial": 2, "is_single_node": True}, {}, False),
        ],
    )
    def test_what_the_machines_can_never_run(
        self, tmp_path: Path, wanted: dict[str, Any], second: dict[str, Any], refused: bool
    ) -> None:
        master = Sandbox(tmp_path / "root", nodes=[Node("a", 2), Node("b", 2, 2, **second)])
        with pytest.raises(Invalid, match="slots_per_trial") if refused else nullcontext():
            master.create(resources=wanted)
        master.close()

    def test_an_experiment_of_an_older_release_is_continued(self, master: Sandbox) -> None:
        made = master.create(activate=False, hyperparameters={"a": 1, "b": {"c": 2}})
        old = {
            **made.config,
            "hyperparameters": {"a": 1, "n": 3},
            "data_layer": {"type": "shared_fs"},
            "internal": None,
        }
        with master.state.database.transaction() as connection:
            experiment_rows.change(connection, made.id, config=old)
        master.experiments.kill(made.id)
        change = "hyperparameters: {a: {type: const, val: {x: 1}}}"
        config = master.experiments.resume_ended(made.id, change).experiment.config
        assert config["hyperparameters"] == {"a": {"type": "const", "val": {"x": 1}}, "n": {"type": "const", "val": 3}}
        assert not {"data_layer", "internal"} & set(config)

    def test_what_runs_differently_here_is_warned_of(self, master: Sandbox) -> None:
        mounts = [{"host_path": "/a", "container_path": "/b"}]
        warnings = master.experiments.create(new(bind_mounts=mounts)).warnings
        assert any("bind_mounts" in line for line in warnings)

    def test_what_no_environment_variable_holds_is_refused(self, master: Sandbox) -> None:
        """Its trials could not be started, here or in a container."""
        master.create(data={"text": "x" * 100_000})
        with pytest.raises(Invalid, match=r"config: .* at most 131072\. Put"):
            master.create(data={"text": "x" * 131_000})
        with pytest.raises(Invalid, match="too large"):
            master.experiments.patch(1, ExperimentPatch(description="x" * 40_000))
        assert len(list(master.experiments.all())) == 1

    def test_what_is_far_too_large_is_not_read_value_by_value(
        self, master: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        master.create()
        master.exit(1)
        monkeypatch.setattr(service, "complete", None)
        monkeypatch.setattr(service, "read_yaml", None)
        config = {**experiment(), "hyperparameters": {"values": [1] * 300_000}}
        text = json.dumps(config)
        for act in (
            lambda: master.experiments.create(NewExperiment(text, b"", "ada")),
            lambda: master.experiments.create(NewExperiment(text, b"", "ada", unmanaged=True)),
            lambda: master.experiments.resume_ended(1, text),
            lambda: master.experiments.preview_search(config),
        ):
            with pytest.raises(Invalid, match=r"too large .* got 900"):
                act()

    def test_from_another_trials_checkpoint(self, master: Sandbox) -> None:
        master.create()
        name = save(master, 1, 3)
        master.create(searcher={"name": "single", "metric": "val", "source_trial_id": 1})
        order = master.run_of(2)
        assert order.latest_checkpoint == name and order.steps_completed == 0


class TestKeeping:
    def test_patch(self, master: Sandbox) -> None:
        made = master.create()
        words = {"name": "n", "description": "d", "notes": "m"}
        patch = ExperimentPatch(**words, labels=["b", "a", "b"], resources={"max_slots": 1, "priority": 3})
        found = master.experiments.patch(made.id, patch)
        assert (found.name, found.description, found.labels, found.notes) == ("n", "d", ("b", "a"), "m")
        resources = found.config["resources"]
        assert (resources["max_slots"], resources["priority"], found.config["name"]) == (1, 3, "n")
        lifted = master.experiments.patch(made.id, ExperimentPatch(resources={"max_slots": None}))
        assert lifted.config["resources"]["max_slots"] is None and lifted.name == "n"

    def test_a_higher_limit_lets_more_run(self, master: Sandbox) -> None:
        made = master.create(**TWO, resources={"slots_per_trial": 1, "max_slots": 1})
        assert len(master.runs()) == 1
        master.experiments.patch(made.id, ExperimentPatch(resources={"max_slots": 2}))
        assert len(master.runs()) == 2

    def test_collection_at_the_end_and_by_a_new_policy(self, master: Sandbox) -> None:
        made = master.create()
        names = [save(master, 1, steps) for steps in (1, 2, 3)]
        for steps, metric in ((1, 0.1), (2, 0.5), (3, 0.3)):
            master.validate(1, metric, batches=steps)
        folder = base(master, 1)
        master.exit(1)
        master.garbage_collector.collect()
        assert [(folder / name).exists() for name in names] == [True, False, True]  # best, latest
        policy = GcPolicy(1, 0, 0)
        assert [item.uuid for item in master.experiments.preview_gc(made.id, policy)] == [names[2]]
        master.experiments.patch(made.id, ExperimentPatch(gc_policy=policy))
        master.garbage_collector.collect()
        states = {item.uuid: item.state for item in master.experiments.checkpoints(made.id)}
        assert [states[name].value for name in names] == ["COMPLETED", "DELETED", "DELETED"]


class TestContinue:
    def test_the_same_trial_goes_on_with_a_changed_config(self, master: Sandbox) -> None:
        made = master.create(max_restarts=0)
        name = save(master, 1, 3)
        master.exit(1, code=1)
        master.experiments.resume_ended(made.id, "max_restarts: 4\nhyperparameters: {b: 2}\n")
        order = master.run_of(1)
        started = (order.latest_checkpoint, order.steps_completed, order.hparams, order.allocation.run_id)
        assert started == (name, 3, {"a": 1, "b": 2}, 2)
        assert master.states(made.id) == ("ACTIVE", ["ACTIVE"])
        master.exit(1)
        assert master.states(made.id) == ("COMPLETED", ["COMPLETED"])

    def test_each_has_a_task_of_its_own_with_its_runs_and_lines(self, master: Sandbox) -> None:
        """And what a log policy has matched in an earlier task does not count."""
        made = master.create(max_restarts=1)
        first = master.run_of(1).allocation
        master.on_matched(first.id, LogMatch(LogPolicy("x", "cancel_retries"), "x"))
        master.exit(1, code=1)
        for _ in range(2):
            master.clock.now += 10
            master.experiments.resume_ended(made.id, "")
            master.exit(1)
        master.experiments.resume_ended(made.id, "")
        master.exit(1, code=1)
        names = master.trials.get(1).task_ids
        assert names == (first.task_id, *(f"{first.task_id}-{number}" for number in (1, 2, 3)))
        found = [master.tasks.task(name) for name in names]
        assert [[run.run_id for run in task.allocations] for task in found] == [[1], [2], [3], [4, 5]]
        assert [task.ended is None for task in found] == [False, False, False, True]
        assert [task.started for task in found[1:3]] == [1010.0, 1020.0]
        assert [task.id for task in master.tasks.tasks()] == [names[3]]
        for run in (1, 2):
            line = logs.entry(f"line of {run}", 1.0)
            logs.append(logs.path_of(master.directory.trial_logs(1), run), [line])
        for name, run in ((names[0], 1), (names[1], 2)):
            lines = [line for line in master.tasks.logs(name, LogQuery(follow=True)) if line is not None]
            task_lines = [line for line in lines if line.source == "task"]
            assert [line.message for line in task_lines] == [f"line of {run}"]
            assert {line.task_id for line in lines} == {name}
            assert task_lines[0].allocation_id == master.tasks.task(name).allocations[0].id

    @pytest.mark.parametrize("name", ["random", "grid"])
    def test_a_search_goes_on_with_the_trials_that_did_not_complete(self, master: Sandbox, name: str) -> None:
        """Six trials, two at a time; four are there when it is killed: two COMPLETED, two CANCELED,
        one of these with a checkpoint."""
        searcher = {"name": name, "metric": "val", "max_concurrent_trials": 2}
        searcher |= {"max_trials": 6} if name == "random" else {}
        space = {"a": {"type": "int", "minval": 0, "maxval": 5, "count": 6}}
        made = master.create(searcher=searcher, hyperparameters=space)
        master.exit(1)
        master.exit(2)
        saved = save(master, 4, 3)
        master.experiments.kill(made.id)
        master.exit(3, code=137)
        master.exit(4, code=137)
        before = master.experiments.trials(made.id)
        assert [trial.state.value for trial in before] == ["COMPLETED"] * 2 + ["CANCELED"] * 2
        master.experiments.resume_ended(made.id, "{}\n")
        assert [order.allocation.trial_id for order in master.runs()] == [3, 4]
        order = master.run_of(4)
        assert (order.latest_checkpoint, order.steps_completed, order.allocation.run_id) == (saved, 3, 2)
        master.restart()
        while master.runs():
            master.exit(master.runs()[0].allocation.trial_id)
        after = master.experiments.trials(made.id)
        assert master.states(made.id) == ("COMPLETED", ["COMPLETED"] * 6)
        assert [(one.request_id, one.hparams) for one in after[:4]] == [(one.request_id, one.hparams) for one in before]
        assert len({trial.request_id for trial in after}) == 6 and {trial.run_id for trial in after[:2]} == {1}
        with pytest.raises(Conflict):  # nothing is left to do
            master.experiments.resume_ended(made.id, "")
        with pytest.raises(Invalid):  # as on a cluster
            master.experiments.resume_ended(made.id, "max_restarts: 3")

    def test_invalid_trials_of_a_search_stay(self, master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pruning, "reason", lambda config, hparams, files: "odd" if hparams["a"] % 2 else None)
        searcher = {"name": "random", "metric": "val", "max_trials": 8}
        made = master.create(searcher=searcher, hyperparameters={"a": {"type": "int", "minval": 0, "maxval": 999}})
        for order in master.runs()[:2]:
            master.trials.early_exit(order.allocation.trial_id, "EXITED_REASON_INVALID_HP")
            master.exit(order.allocation.trial_id)
        while master.runs():
            master.exit(master.runs()[0].allocation.trial_id, code=1)
        before = master.experiments.trials(made.id)
        assert sum(trial.pruned for trial in before) >= 1 and len({trial.state for trial in before}) > 1
        master.experiments.resume_ended(made.id, "")
        while master.runs():
            master.exit(master.runs()[0].allocation.trial_id)
        after = master.experiments.trials(made.id)
        assert [(one.request_id, one.pruned) for one in after] == [(one.request_id, one.pruned) for one in before]
        assert master.states(made.id)[0] == "COMPLETED"
        again = [trial.id for trial in before if trial.state is TrialState.ERROR and not trial.pruned]
        assert again and [trial.id for trial in after if trial.run_id == 3] == again  # one restart, then continued

    def test_a_longer_training_and_a_part_of_the_searcher_are_taken(self, master: Sandbox) -> None:
        made = master.create(
            searcher={"name": "single", "metric": "val", "max_length": {"batches": 8}},
            hyperparameters={"a": {"type": "double", "minval": 0, "maxval": 1}},
        )
        drawn = master.run_of(1).hparams
        master.exit(1)
        master.experiments.resume_ended(made.id, "searcher: {max_length: {batches: 16}}")
        assert (
            master.run_of(1).config["searcher"]["max_length"] == {"batches": 16} and master.run_of(1).hparams == drawn
        )
        master.exit(1)
        whole = "searcher: {name: single, metric: val, max_length: {batches: 32}}"
        assert not any("searcher" in line for line in master.experiments.resume_ended(made.id, whole).warnings)
        with pytest.raises(Conflict):
            master.experiments.resume_ended(made.id, "")
        master.exit(1)
        with pytest.raises(Invalid):
            master.experiments.resume_ended(made.id, "searcher: {name: random, metric: val, max_trials: 2}")

    def test_what_cannot_be_continued(self, master: Sandbox) -> None:
        asha = {"name": "adaptive_asha", "metric": "val", "max_trials": 2, "max_time": 8, "time_metric": "batches"}
        running, sweep = master.create(), master.create(searcher=asha)
        for number, text, refusal in (
            (running.id, "", Conflict),
            (sweep.id, "", Unsupported),
            (9, "", NotFound),
            (running.id, "[1, 2", Invalid),
        ):
            with pytest.raises(refusal):
                master.experiments.resume_ended(number, text)
        master.exit(1)
        for place in ("workspace", "project"):
            with pytest.raises(Invalid, match="det experiment move"):
                master.experiments.resume_ended(running.id, f"{place}: Uncategorized")
