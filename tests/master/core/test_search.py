"""How a search creates, stops and loses trials, and outlives the master."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.master.fakes import Sandbox, experiment
from tests.support.archive import tgz
from zero_trial.master.core.context_archive import read_context
from zero_trial.master.core.state import searcher_of
from zero_trial.master.search import Create, ExitReason, pruning, restore


def test_small_configuration_files_of_a_context_are_read() -> None:
    found = read_context(
        tgz({"./ds_config.json": b"{}", "deep/a.yaml": b"a: 1", "model.py": b"pass", "startup-hook.sh": b""})
    )
    assert found.files == {"ds_config.json": b"{}", "deep/a.yaml": b"a: 1"} and found.has_hook
    assert not read_context(tgz({"deep/startup-hook.sh": b""})).has_hook and not read_context(b"").has_hook


def test_a_searcher_goes_on_where_it_was() -> None:
    random = {"name": "random", "metric": "val", "max_trials": 3, "max_concurrent_trials": 1}
    config = experiment(searcher=random, hyperparameters={"a": {"type": "double", "minval": 0.0, "maxval": 1.0}})
    first = searcher_of(config)
    start = first.start()
    assert isinstance(start[0], Create)
    again = restore(config["searcher"], config["hyperparameters"], first.snapshot())
    name = start[0].request_id
    assert again.on_exited(name, ExitReason.COMPLETED) == first.on_exited(name, ExitReason.COMPLETED)


@pytest.mark.parametrize(("seed", "same"), [(7, True), (8, False)])
def test_the_seed_decides(seed: int, same: bool) -> None:
    space = {"a": {"type": "double", "minval": 0.0, "maxval": 1.0}}
    random = {"name": "random", "metric": "val", "max_trials": 1}
    one, two = (
        searcher_of(
            experiment(searcher=random, hyperparameters=space, reproducibility={"experiment_seed": number})
        ).start()[0]
        for number in (7, seed)
    )
    assert isinstance(one, Create) and isinstance(two, Create) and (one.hparams == two.hparams) == same


GRID = {"name": "grid", "metric": "val", "max_concurrent_trials": 2}
FOUR = {"a": {"type": "categorical", "vals": [1, 2, 3, 4]}}


def test_a_grid_runs_as_many_at_once_as_there_are_slots_and_to_its_end(master: Sandbox) -> None:
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    seen = []
    while master.runs():
        assert len(master.runs()) <= 2
        trial_id = master.runs()[0].allocation.trial_id
        seen.append(master.run_of(trial_id).hparams["a"])
        master.validate(trial_id, 1.0)
        master.exit(trial_id)
    assert sorted(seen) == [1, 2, 3, 4]
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED"] * 4)


def test_crashing_trials_do_not_stop_a_sweep(master: Sandbox) -> None:
    made = master.create(searcher=GRID, hyperparameters=FOUR, max_restarts=0)
    while master.runs():
        trial_id = master.runs()[0].allocation.trial_id
        if trial_id == 2:
            master.exit(trial_id, code=1)
        else:
            master.validate(trial_id, 1.0)
            master.exit(trial_id)
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED", "ERROR", "COMPLETED", "COMPLETED"])


def test_a_trial_whose_metric_never_comes_does_not_hang_a_search(master: Sandbox) -> None:
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    while master.runs():
        master.exit(master.runs()[0].allocation.trial_id)
    assert master.experiments.get(made.id).state.final


def test_a_validation_without_the_searchers_metric_ends_an_asha_trial_as_failed(master: Sandbox) -> None:
    asha = {"name": "adaptive_asha", "metric": "val", "max_trials": 2, "max_time": 16, "time_metric": "batches"}
    master.create(searcher=asha, hyperparameters={"a": {"type": "double", "minval": 0, "maxval": 1}})
    run = master.run_of(1).allocation
    master.trials.report_metrics(1, run_id=1, group="validation", steps_completed=1, metrics={"other": 1})
    assert run.id in master.agent.killed
    master.exit(1, code=137)
    assert master.state_of(1) == "ERROR"
    assert len(master.experiments.trials(1)) > 1  # the search goes on


ASHA = {
    "name": "adaptive_asha",
    "metric": "val",
    "max_trials": 4,
    "max_concurrent_trials": 2,
    "max_time": 4,
    "time_metric": "batches",
    "divisor": 2,
    "bracket_rungs": [2],
}


@pytest.mark.parametrize(
    ("searcher", "trials"),
    [
        ({"name": "random", "metric": "val", "max_trials": 3, "max_concurrent_trials": 1}, 3),
        ({"name": "grid", "metric": "val", "max_concurrent_trials": 1}, 4),
        (ASHA, 2),  # as on Determined's master: trials follow only those that were stopped or failed
    ],
)
def test_hyperparameters_that_the_trial_refuses_count_and_are_not_replaced(
    master: Sandbox, searcher: dict[str, object], trials: int
) -> None:
    made = master.create(searcher=searcher, hyperparameters=FOUR)
    while master.runs():
        trial_id = master.runs()[0].allocation.trial_id
        master.trials.early_exit(trial_id, "EXITED_REASON_INVALID_HP")
        master.exit(trial_id)
    assert master.states(made.id) == ("COMPLETED", ["COMPLETED"] * trials)


def test_an_adaptive_search_is_killed_before_its_first_report(master: Sandbox) -> None:
    """With some of them that ends a Determined 0.38.1 master."""
    made = master.create(searcher=ASHA, hyperparameters=FOUR)
    master.experiments.kill(made.id)
    while master.runs():
        master.exit(master.runs()[0].allocation.trial_id, code=137)
    assert master.states(made.id) == ("CANCELED", ["CANCELED"] * 2)


def test_an_experiment_whose_trials_were_all_killed_is_canceled(master: Sandbox) -> None:
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    while master.runs():
        trial_id = master.runs()[0].allocation.trial_id
        master.trials.kill(trial_id)
        master.exit(trial_id, code=137)
    assert master.states(made.id) == ("CANCELED", ["CANCELED"] * 4)
    assert master.experiments.get(made.id).progress is None


def test_points_that_cannot_be_reconciled_are_pruned_counted_and_explained(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "reason", lambda config, hparams, files: "odd" if hparams["a"] % 2 else None)
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    while master.runs():
        trial_id = master.runs()[0].allocation.trial_id
        master.validate(trial_id, 1.0)
        master.exit(trial_id)
    ended = master.experiments.get(made.id)
    assert (ended.state.value, ended.num_trials, ended.pruned_trials) == ("COMPLETED", 4, 2)
    pruned = [trial for trial in master.experiments.trials(made.id) if trial.pruned]
    assert all(trial.state.value == "ERROR" and "odd" in trial.reason and trial.run_id == 0 for trial in pruned)
    from zero_trial.master.logs import LogQuery

    line = next(iter(master.trials.logs(pruned[0].id, LogQuery())))
    assert line is not None and "odd" in line.message and line.level == "ERROR"


def test_points_of_a_paused_experiment_are_pruned_when_it_is_activated(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it has the trials that Determined's master creates."""
    monkeypatch.setattr(pruning, "reason", lambda config, hparams, files: "odd" if hparams["a"] % 2 else None)
    random = {"name": "random", "metric": "val", "max_trials": 4}
    space = {"a": {"type": "int", "minval": 0, "maxval": 999}}
    made = master.create(searcher=random, hyperparameters=space, activate=False)
    values = [trial.hparams["a"] for trial in master.experiments.trials(made.id)]
    assert master.states(made.id) == ("PAUSED", ["PAUSED"] * 4) and any(value % 2 for value in values)
    master.restart()
    master.experiments.activate(made.id)
    found = master.experiments.trials(made.id)
    assert [trial.hparams["a"] for trial in found[:4]] == values
    assert [trial.pruned for trial in found] == [trial.hparams["a"] % 2 == 1 for trial in found]
    assert len(found) == 4  # what is pruned counts


def test_a_search_of_nothing_but_pruned_points_fails(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "reason", lambda config, hparams, files: "never")
    random = {"name": "random", "metric": "val", "max_trials": 40, "max_concurrent_trials": 2}
    made = master.create(searcher=random, hyperparameters={"a": {"type": "double", "minval": 0, "maxval": 1}})
    ended = master.experiments.get(made.id)
    assert ended.state.value == "ERROR" and "never" in ended.error and ended.pruned_trials == 40


def test_a_search_that_fails_ends_its_experiment_and_nothing_else(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zero_trial.master.search.searcher import GridSearch

    other = master.create()
    made = master.create(searcher=GRID, hyperparameters=FOUR)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(GridSearch, "on_validation", fail)
    master.validate(2, 1.0)
    assert master.agent.killed == [master.run_of(2).allocation.id]
    master.exit(2, code=137)
    master.exit(1)
    assert master.states(other.id)[0] == "COMPLETED"
    found = master.experiments.get(made.id)
    assert found.state.value == "ERROR" and "a fault of ours" in found.error


def test_a_point_that_cannot_be_looked_at_is_launched(master: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pruning, "reason", fail)
    master.create()
    assert len(master.runs()) == 1


def test_task_ids_follow_from_the_seed_and_ids_of_allocations_differ_from_master_to_master(
    master: Sandbox, tmp_path: Path
) -> None:
    """Ids of allocations name files in /tmp."""
    other = Sandbox(tmp_path / "other")
    try:
        mine, theirs = (each.experiments.trials(each.create().id)[0] for each in (master, other))
        assert mine.task_id == theirs.task_id == f"1.{mine.request_id}"
        names = [each.runs()[0].allocation.id for each in (master, other)]
        assert names[0] != names[1] and all(name.startswith(mine.task_id) and name.endswith(".1") for name in names)
    finally:
        other.close()
