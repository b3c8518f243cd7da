"""A sweep read from the master's store: decisions, memory, the best point."""

from __future__ import annotations

import copy
import html
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.report.searched import CONFIG, DS_CONFIG, play
from tests.support.archive import tgz
from zero_trial.ds_config.overlay import overwrite_ds_config
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import read_experiment
from zero_trial.master.records import MetricReport
from zero_trial.master.search import Stop, build
from zero_trial.master.store.database import reading
from zero_trial.report.master_reader import (
    RungMeasurement,
    as_hyperparameters,
    best_experiment,
    bracket_histories,
    from_master_store,
    member,
    ordinal,
    read_trial,
)
from zero_trial.report.report_data import RungOutcome, Tone, as_yaml
from zero_trial.report.store_curves import StoreCurves, steps_per_second
from zero_trial.report.sweep_page import render_sweep

POINT = {"global_batch_size": 16, "ds_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}}


def test_one_trial_with_constant_values() -> None:
    before = copy.deepcopy(CONFIG)
    found = best_experiment(CONFIG, POINT, 11, {"zero_optimization": {"stage": 1}})
    assert before == CONFIG
    assert found["searcher"] == {
        "name": "single",
        "metric": "validation_loss",
        "smaller_is_better": True,
        "max_length": {"batches": 60},
    }
    assert found["reproducibility"]["experiment_seed"] == 11
    assert found["data"] == {"ds_config": {"zero_optimization": {"stage": 1}}, "source": "stdlib"}
    experiment = read_experiment(found)
    assert experiment.hyperparameters == POINT
    assert not experiment.searcher.searches


def test_a_nested_type_is_written_as_a_const() -> None:
    assert as_hyperparameters(POINT)["ds_config"]["optimizer"] == {
        "type": "const",
        "val": {"type": "Adam", "params": {"lr": 1e-4}},
    }


def test_the_file_is_read_back_as_it_was_and_its_comment_stays_one() -> None:
    experiment = best_experiment(CONFIG, POINT, None)
    text = as_yaml(experiment, "trial 1\nevil: true")
    assert yaml.safe_load(text) == experiment
    assert text.splitlines()[0] == "# trial 1 evil: true"


def test_a_searcher_that_states_its_length_the_other_way() -> None:
    config = {**CONFIG, "searcher": {"name": "random", "metric": "m", "max_length": {"epochs": 3}}}
    assert best_experiment(config, POINT, None)["searcher"]["max_length"] == {"epochs": 3}


ONE_BRACKET: dict[str, Any] = {
    **CONFIG,
    "searcher": {**CONFIG["searcher"], "bracket_rungs": [2], "divisor": 2, "max_time": 4},
}
NAMES = {str(number): str(number) for number in range(99)}


def played(losses: list[tuple[int, float]], config: dict[str, Any] = ONE_BRACKET) -> tuple[Any, list[tuple[str, str]]]:
    """Every trial reports in turn at the first rung: what the report says, and whom the search
    really stopped."""
    search = build(config["searcher"], config["hyperparameters"], 3)
    ids = [action.request_id for action in search.start()]
    stops, measured = [], []
    for steps, loss in losses:
        request = ids[len(measured)]
        measured.append(RungMeasurement(request, steps, loss))
        for action in search.on_validation(request, {"batches": steps, "validation_loss": loss}):
            if isinstance(action, Stop):
                stops.append(action.request_id)
            else:
                ids.append(action.request_id)
    return bracket_histories(config, search.snapshot(), measured, {}), [(request, "stopped") for request in stops]


def test_the_worse_of_two_is_stopped_with_the_reason() -> None:
    (ladder,), stops = played([(2, 1.0), (2, 2.0)])
    assert ladder.units == (2, 4)
    first, second = ladder.decisions
    assert (first.verdict, first.why) == (RungOutcome.WENT_ON, "The first to be measured here goes on.")
    assert second.verdict is RungOutcome.STOPPED
    assert second.why == "2nd of the 2 measured here so far; the best 1 may go on (1 in 2)."
    assert [(second.trial, "stopped")] == stops


def test_a_late_better_one_goes_on() -> None:
    (ladder,), stops = played([(2, 2.0), (2, 1.0)])
    assert [decision.verdict for decision in ladder.decisions] == [RungOutcome.WENT_ON, RungOutcome.WENT_ON]
    assert stops == []


def test_one_validation_may_pass_both_rungs() -> None:
    (ladder,), _ = played([(4, 1.0)])
    assert [(d.rung, d.units, d.verdict) for d in ladder.decisions] == [
        (0, 2, RungOutcome.WENT_ON),
        (1, 4, RungOutcome.FINISHED),
    ]


def test_not_a_number_is_behind_all_others() -> None:
    (ladder,), _ = played([(2, 5.0), (2, math.nan)])
    assert ladder.decisions[1].verdict is RungOutcome.STOPPED


def test_another_search_or_a_broken_snapshot_has_no_ladders() -> None:
    grid = {**CONFIG, "searcher": {"name": "grid", "metric": "validation_loss", "max_concurrent_trials": 1}}
    assert bracket_histories(grid, {"kind": "grid"}, [], NAMES) == ()
    assert bracket_histories(ONE_BRACKET, {}, [], NAMES) == ()
    assert bracket_histories(ONE_BRACKET, {"kind": "adaptive_asha", "draws": 3}, [], NAMES) == ()


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 112)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "102nd",
        "112th",
    ]


def test_every_trial_and_every_decision(tmp_path: Path) -> None:
    truth = play(tmp_path / "db")
    report = from_master_store(tmp_path / "db", 1)
    decisions = [decision for ladder in report.ladders for decision in ladder.decisions]
    assert sorted(d.trial for d in decisions if d.verdict is RungOutcome.STOPPED) == sorted(truth.stopped)
    assert sorted(d.trial for d in decisions if d.verdict is RungOutcome.FINISHED) == sorted(truth.finished)
    assert len(truth.stopped) >= 3 and len(truth.finished) >= 1
    assert len(report.trials) == 8
    words = {trial.id: trial.status.word for trial in report.trials}
    assert {words[trial] for trial in truth.stopped} == {"stopped early"}
    assert {words[trial] for trial in truth.finished} == {"completed"}
    with reading(tmp_path / "db") as connection:  # a trial's own page says the same
        assert {read_trial(connection, StoreCurves(), int(trial)).status.word for trial in truth.stopped} == {
            "stopped early"
        }
    assert report.best is not None and (report.best.metric, report.best.trial) == truth.best
    assert report.ranked()[0].id == truth.best[1]
    assert (report.status.word, report.status.tone) == ("completed", Tone.GOOD)
    assert report.unit == "batches"
    assert ("took", "4 min 0 s") in report.facts


def test_what_a_trial_was_like(tmp_path: Path) -> None:
    truth = play(tmp_path / "db")
    report = from_master_store(tmp_path / "db", 1)
    trial = next(trial for trial in report.trials if trial.id == truth.finished[0])
    assert set(trial.point) == {"ds_config.optimizer.params.lr", "ds_config.zero_optimization.stage"}
    assert trial.curve.steps[0] == 15 and trial.curve.steps[-1] == 60
    assert (trial.memory.planned, trial.memory.measured) == (1000 * int(trial.id), 900 * int(trial.id))
    assert trial.throughput == pytest.approx(5 * 16), "five steps a second of 16 samples"
    assert report.throughput_unit == "samples/s"
    assert [(axis.name.rpartition(".")[2], axis.log, axis.choices) for axis in report.axes] == [
        ("lr", True, ()),
        ("stage", False, ("0", "1", "2", "3")),
    ]


def test_points_that_were_pruned_are_counted_by_reason(tmp_path: Path) -> None:
    truth = play(tmp_path / "db", pruned=2)
    report = from_master_store(tmp_path / "db", 1)
    assert report.pruned == (("train_batch_size 6 is not 2 x 2", 2),)
    assert sorted(trial.id for trial in report.trials if trial.pruned) == sorted(truth.pruned)


def test_the_best_configuration_runs(tmp_path: Path) -> None:
    """It is read as an experiment of one trial, and its ds_config is that of the winner, with
    nothing left of the sweep."""
    truth = play(tmp_path / "db")
    report = from_master_store(tmp_path / "db", 1)
    assert report.best is not None
    path = tmp_path / "best.yaml"
    path.write_text(report.best.text)
    experiment = read_experiment(path)
    winner = next(trial for trial in report.trials if trial.id == truth.best[1])
    assert not experiment.searcher.searches
    assert experiment.search_space == ()
    assert experiment.searcher.max_length is not None and experiment.searcher.max_length.count == 60
    leaves = experiment.hyperparameters["ds_config"]
    assert leaves["optimizer"]["params"]["lr"] == winner.point["ds_config.optimizer.params.lr"]
    filled = overwrite_ds_config(experiment.data["ds_config"], leaves)
    assert filled["optimizer"]["type"] == "AdamW", "the file of the context directory stands in the experiment"
    assert filled["zero_optimization"]["stage"] == winner.point["ds_config.zero_optimization.stage"]
    assert report.best.text.startswith(f"# trial {truth.best[1]} of experiment 1: zero-trial run best.yaml MODEL_DIR\n")


def test_a_rate_that_the_scheduler_replaces_is_not_the_winners(tmp_path: Path) -> None:
    """An earlier master, or one that did not see the ds_config, has launched such trials."""
    config = copy.deepcopy(CONFIG)
    config["hyperparameters"]["ds_config"]["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
    play(tmp_path / "db", config)
    report = from_master_store(tmp_path / "db", 1)
    (note,) = report.notes
    assert "optimizer.params.lr" in note and "warmup_max_lr, which is 0.001" in note
    assert report.best is not None and note in html.unescape(render_sweep(report))
    play(tmp_path / "other")
    assert from_master_store(tmp_path / "other", 1).notes == ()


def test_a_grid_has_trials_and_no_ladders(tmp_path: Path) -> None:
    searcher = {"name": "random", "metric": "validation_loss", "max_trials": 3, "max_length": {"batches": 15}}
    from tests.report.searched import _experiment, _trial
    from zero_trial.master.search import Create, build
    from zero_trial.master.store import Database, experiment_rows, trial_rows

    config: dict[str, Any] = {**CONFIG, "searcher": searcher}
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        experiment_rows.add(connection, _experiment(config), tgz({}))
        search = build(searcher, config["hyperparameters"], 1)
        for action in search.start():
            if isinstance(action, Create):
                trial_rows.add(connection, _trial(1, action))
        experiment_rows.change(connection, 1, snapshot=search.snapshot())
    database.close()
    report = from_master_store(tmp_path / "db", 1)
    assert len(report.trials) == 3
    assert (report.ladders, report.best, report.ranked()) == ((), None, ())
    assert report.trials[0].status.tone is Tone.BUSY


def test_an_experiment_that_is_not_there(tmp_path: Path) -> None:
    play(tmp_path / "db")
    with pytest.raises(ConfigError, match="no such experiment: got 7, expected 1"):
        from_master_store(tmp_path / "db", 7)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    play(tmp_path / "db")
    before = (tmp_path / "db").read_bytes()
    from_master_store(tmp_path / "db", 1)
    assert (tmp_path / "db").read_bytes() == before


def test_one_file_of_a_context_directory() -> None:
    archive = tgz({"a/ds.json": json.dumps(DS_CONFIG), "big": "x" * (2**20 + 1)})
    assert json.loads(member(archive, "./a/ds.json") or "") == DS_CONFIG
    assert member(archive, "big") is None
    assert member(archive, "../ds.json") is None
    assert member(b"no archive", "a") is None


def test_speed_is_measured_within_a_run_only() -> None:
    def report_of(run: int, steps: int, at: float) -> MetricReport:
        return MetricReport(1, run, "training", steps, {}, reported=at)

    assert steps_per_second([report_of(1, 10, 0.0), report_of(1, 30, 4.0)]) == 5.0
    assert steps_per_second([report_of(1, 10, 0.0), report_of(2, 30, 1000.0), report_of(2, 40, 1002.0)]) == 5.0
    assert steps_per_second([report_of(1, 10, 0.0)]) is None
