"""How a search creates, stops and loses trials, and outlives the master."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.master.fakes import Sandbox, experiment
from tests.support.archive import tgz
from zero_trial.master.core.context_archive import read_context
from zero_trial.master.core.state import searcher_of
from zero_trial.master.search import pruning


def test_small_configuration_files_of_a_context_are_read() -> None:
    found = read_context(
        tgz({"./ds_config.json": b"{}", "deep/a.yaml": b"a: 1", "model.py": b"pass", "startup-hook.sh": b""})
    )
    assert found.files == {"ds_config.json": b"{}", "deep/a.yaml": b"a: 1"} and found.has_hook
    assert not read_context(tgz({"deep/startup-hook.sh": b""})).has_hook and not read_context(b"").has_hook


def test_the_experiments_seed_decides_what_is_drawn() -> None:
    config = experiment(
        searcher={"name": "random", "metric": "val", "max_trials": 1},
        hyperparameters={"a": {"type": "double", "minval": 0.0, "maxval": 1.0}},
    )
    drawn = [searcher_of({**config, "reproducibility": {"experiment_seed": seed}}).start() for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


GRID = {"name": "grid", "metric": "val", "max_concurrent_trials": 2}
FOUR = {"a": {"type": "categorical", "vals": [1, 2, 3, 4]}}


def play(master: Sandbox, act: Callable[[int], int] = lambda trial_id: 0) -> None:
    """Let each trial do something and end with the code that it returns."""
    while master.runs():
        assert len(master.runs()) <= 2
        trial_id = master.runs()[0].allocation.trial_id
        master.exit(trial_id, act(trial_id))


ONE_BY_ONE = {"metric": "val", "max_concurrent_trials": 1}


def test_a_validation_without_the_searchers_metric_ends_an_asha_trial_as_failed(master: Sandbox) -> None:
    asha = {"name": "adaptive_asha", "metric": "val", "max_trials": 2, "max_time": 16, "time_metric": "batches"}
    master.create(searcher=asha, hyperparameters={"a": {"type": "double", "minval": 0, "maxval": 1}})
    run = master.run_of(1).allocation
    master.trials.report_metrics(1, run_id=1, group="validation", steps_completed=1, metrics={"other": 1})
    assert run.id in master.agent.killed
    master.exit(1, code=137)
    assert master.state_of(1) == "ERROR"
    assert len(master.experiments.trials(1)) > 1  # the search goes on


ASHA = {"name": "adaptive_asha", "metric": "val", "max_trials": 4, "max_concurrent_trials": 2, "max_time": 4}
ASHA |= {"time_metric": "batches", "divisor": 2, "bracket_rungs": [2]}


@pytest.mark.parametrize(
    ("searcher", "does", "state", "trials"),
    [
        (GRID, "validate", "COMPLETED", ["COMPLETED"] * 4),
        (GRID, "crash", "COMPLETED", ["COMPLETED", "ERROR", "COMPLETED", "COMPLETED"]),
        (GRID, "end", "COMPLETED", ["COMPLETED"] * 4),  # the metric never comes
        (GRID, "kill", "CANCELED", ["CANCELED"] * 4),
        # hyperparameters that the trial refuses count, and are not replaced
        ({**ONE_BY_ONE, "name": "random", "max_trials": 3}, "refuse", "COMPLETED", ["COMPLETED"] * 3),
        ({**ONE_BY_ONE, "name": "grid"}, "refuse", "COMPLETED", ["COMPLETED"] * 4),
        # as on Determined's master: trials follow only those that were stopped or failed
        (ASHA, "refuse", "COMPLETED", ["COMPLETED"] * 2),
        # before the first report, which with some of them ends a Determined 0.38.1 master
        (ASHA, "kill all", "CANCELED", ["CANCELED"] * 2),
    ],
)
def test_what_becomes_of_a_search(
    master: Sandbox, searcher: dict[str, object], does: str, state: str, trials: list[str]
) -> None:
    made = master.create(searcher=searcher, hyperparameters=FOUR, max_restarts=0)
    seen = []

    def act(trial_id: int) -> int:
        seen.append(master.run_of(trial_id).hparams["a"])
        if does in ("validate", "crash"):
            master.validate(trial_id, 1.0)
        if does == "kill":
            master.trials.kill(trial_id)
        if does == "refuse":
            master.trials.early_exit(trial_id, "EXITED_REASON_INVALID_HP")
        return 137 if "kill" in does else int(does == "crash" and trial_id == 2)

    if does == "kill all":
        master.experiments.kill(made.id)
    play(master, act)
    assert master.states(made.id) == (state, trials)
    assert searcher["name"] != "grid" or sorted(seen) == [1, 2, 3, 4]
    assert (master.experiments.get(made.id).progress is None) == ("kill" in does)


def test_points_that_cannot_be_reconciled_are_pruned_counted_and_explained(
    master: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "reason", lambda config, hparams, files: "odd" if hparams["a"] % 2 else None)
    made = master.create(searcher=GRID, hyperparameters=FOUR)
    play(master)
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
