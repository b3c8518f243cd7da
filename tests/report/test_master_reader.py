"""A master's store read: a sweep with its decisions, a trial, the best point, and all of it again
while the store grows."""

from __future__ import annotations

import copy
import html
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.report import samples
from tests.report.samples import CONFIG, TRAVERSALS, experiment_of, play, trial_of
from tests.support.archive import tgz
from zero_trial.ds_config.overlay import overwrite_ds_config
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import read_experiment
from zero_trial.master import logs
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import MetricReport
from zero_trial.master.search.searcher import Create, Stop, build
from zero_trial.master.store import Database, experiment_rows, metric_rows, trial_rows
from zero_trial.report.master_reader import (
    Measured,
    StoreSource,
    as_hyperparameters,
    best_experiment,
    bracket_histories,
    from_master_store,
    ordinal,
)
from zero_trial.report.report_data import RungOutcome, Tone, as_yaml
from zero_trial.report.sweep_page import render_sweep

POINT = {"global_batch_size": 16, "ds_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}}


def test_one_trial_with_constant_values() -> None:
    before = copy.deepcopy(CONFIG)
    found = best_experiment(CONFIG, POINT, 11, {"zero_optimization": {"stage": 1}})
    assert before == CONFIG
    single = {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    assert found["searcher"] == single | {"max_length": {"batches": 60}}
    assert found["reproducibility"]["experiment_seed"] == 11
    assert found["data"] == {"ds_config": {"zero_optimization": {"stage": 1}}, "source": "stdlib"}
    experiment = read_experiment(found)
    assert experiment.hyperparameters == POINT
    assert not experiment.searcher.searches


def test_the_file_of_a_point_is_read_back_as_it_was_and_its_comment_stays_one() -> None:
    config = {**CONFIG, "searcher": {"name": "random", "metric": "m", "max_length": {"epochs": 3}}}
    experiment = best_experiment(config, POINT, None)
    assert experiment["searcher"]["max_length"] == {"epochs": 3}
    text = as_yaml(experiment, "trial 1\nevil: true")
    assert yaml.safe_load(text) == experiment
    assert text.splitlines()[0] == "# trial 1 evil: true: zero-trial run best.yaml MODEL_DIR"
    written = {"type": "const", "val": {"type": "Adam", "params": {"lr": 1e-4}}}  # else it reads as a range
    assert as_hyperparameters(POINT)["ds_config"]["optimizer"] == written


ONE_BRACKET: dict[str, Any] = {
    **CONFIG,
    "searcher": {**CONFIG["searcher"], "bracket_rungs": [2], "divisor": 2, "max_time": 4},
}
WENT_ON, STOPPED, FINISHED = RungOutcome.WENT_ON, RungOutcome.STOPPED, RungOutcome.FINISHED


@pytest.mark.parametrize(
    ("losses", "verdicts", "why"),
    [
        ([(2, 1.0)], [(0, WENT_ON)], "The first one measured here continues."),
        ([(2, 1.0), (2, 2.0)], [(0, WENT_ON), (0, STOPPED)], "2nd of the 2 measured here so far; the best 1 may continue (1 in 2)."),
        (
            [(2, 2.0), (2, 1.0)],  # a late better one goes on
            [(0, WENT_ON), (0, WENT_ON)],
            "1st of the 2 measured here so far; the best 1 may continue (1 in 2).",
        ),
        ([(4, 1.0)], [(0, WENT_ON), (1, FINISHED)], "1st of 1 that reached this rung."),  # past both rungs
        ([(2, 5.0), (2, math.nan)], [(0, WENT_ON), (0, STOPPED)], "2nd of the 2 measured here so far; the best 1 may continue (1 in 2)."),
    ],
)  # fmt: skip
def test_decisions_are_those_of_the_search(
    losses: list[tuple[int, float]], verdicts: list[tuple[int, RungOutcome]], why: str
) -> None:
    search = build(ONE_BRACKET["searcher"], ONE_BRACKET["hyperparameters"], 3)
    ids = [action.request_id for action in search.start()]
    stops: list[str] = []
    measured: list[Measured] = []
    for steps, loss in losses:  # every trial reports in turn at the first rung
        request = ids[len(measured)]
        measured.append((request, steps, loss))
        for action in search.on_validation(request, {"batches": steps, "validation_loss": loss}):
            if isinstance(action, Stop):
                stops.append(action.request_id)
            else:
                ids.append(action.request_id)
    (ladder,) = bracket_histories(ONE_BRACKET, search.snapshot(), measured, {})
    assert ladder.units == (2, 4)
    assert [(decision.rung, decision.verdict) for decision in ladder.decisions] == verdicts
    assert ladder.decisions[-1].why == why
    assert [one.trial for one in ladder.decisions if one.verdict is not WENT_ON] == stops


def test_ladders_of_another_search_and_ordinals() -> None:
    """Another search, or a broken snapshot, has none."""
    grid = {**CONFIG, "searcher": {"name": "grid", "metric": "validation_loss", "max_concurrent_trials": 1}}
    assert bracket_histories(grid, {"kind": "grid"}, [], {}) == ()
    for snapshot in ({}, {"kind": "adaptive_asha", "draws": 3}):
        assert bracket_histories(ONE_BRACKET, snapshot, [], {}) == ()
    said = {1: "1st", 2: "2nd", 3: "3rd", 4: "4th", 11: "11th", 13: "13th", 21: "21st", 112: "112th"}
    assert {number: ordinal(number) for number in said} == said


def test_every_trial_and_every_decision(tmp_path: Path) -> None:
    searcher = {**CONFIG["searcher"], "max_trials": 16, "max_concurrent_trials": 6}
    truth = play(tmp_path / "db", {**CONFIG, "searcher": searcher}, pruned=2)
    before = (tmp_path / "db").read_bytes()
    report = from_master_store(tmp_path / "db", 1)
    assert (tmp_path / "db").read_bytes() == before
    decisions = [decision for ladder in report.ladders for decision in ladder.decisions]
    assert sorted(d.trial for d in decisions if d.verdict is STOPPED) == sorted(truth.stopped)
    assert sorted(d.trial for d in decisions if d.verdict is FINISHED) == sorted(truth.finished)
    assert len(truth.stopped) >= 3 and len(truth.finished) >= 1
    assert report.pruned == (("train_batch_size 6 is not 2 x 2", 2),)
    assert sorted(trial.id for trial in report.trials if trial.pruned) == sorted(truth.pruned)
    words = {trial.id: trial.status.word for trial in report.trials}
    assert len(words) == 16
    assert {words[trial] for trial in truth.stopped} == {"stopped early"}
    assert {words[trial] for trial in truth.finished} == {"completed"}
    assert report.best is not None and (report.best.metric, report.best.trial) == truth.best
    assert report.ranked()[0].id == truth.best[1]
    assert (report.status.word, report.status.tone, report.unit) == ("completed", Tone.GOOD, "batches")
    assert ("took", "4 min 0 s") in report.facts
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
    with pytest.raises(ConfigError, match="the experiment does not exist: got 7, expected 1"):
        from_master_store(tmp_path / "db", 7)


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
    config: dict[str, Any] = {**CONFIG, "searcher": searcher}
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        experiment_rows.add(connection, experiment_of(config), tgz({}))
        search = build(searcher, config["hyperparameters"], 1)
        for action in search.start():
            if isinstance(action, Create):
                trial_rows.add(connection, trial_of(1, action))
        experiment_rows.change(connection, 1, snapshot=search.snapshot())
    database.close()
    report = from_master_store(tmp_path / "db", 1)
    assert len(report.trials) == 3
    assert (report.ladders, report.best, report.ranked()) == ((), None, ())
    assert report.trials[0].status.tone is Tone.BUSY


# What the board asks for.


def test_a_masters_store(store: MasterDirectory) -> None:
    source = StoreSource(store)
    rows = source.overview().rows
    assert [(row.name, row.status.word, row.done) for row in rows] == [("2", "active", 0.42), ("1", "completed", 1.0)]
    report = source.sweep("1", None)
    assert report.ladders and len(report.trials) == 16
    assert {("training", "accuracy"), ("validation", "validation_loss")} <= set(report.metrics)
    drawn = source.sweep("1", ("training", "accuracy"))
    longest = max(drawn.trials, key=lambda trial: trial.steps)
    assert drawn.drawn == "training accuracy" and len(longest.curve) > 50
    assert [trial.best for trial in drawn.trials] == [trial.best for trial in report.trials]
    assert not any(len(trial.curve) for trial in source.sweep("1", ("training", "never seen")).trials)
    trial = source.run(longest.id)
    assert trial.training is not None and {one.name for one in trial.progress} == {"accuracy", "learning rate"}
    assert [saved.kept for saved in trial.checkpoints] == [False, True, True, True]
    assert {"ds_config.optimizer.params.lr", "optimizer.params", "zero_optimization.reduce_bucket_size"} <= {
        setting.key for setting in trial.settings
    }
    assert "train_micro_batch_size_per_gpu" in {setting.key for setting in trial.batch}
    assert (trial.experiment, trial.status.word) == ("1", longest.status.word)
    assert trial.point()["hyperparameters.model.width"] == 64
    for name in (*TRAVERSALS, "99999", "-1", "1e1", "²"):
        with pytest.raises(ConfigError):
            source.run(name)


def reports(connection: Any, trial: int, steps: Iterable[int], *, run: int = 1, **values: float) -> None:
    for step in steps:
        at = samples.STARTED + 1000 * trial + step
        metric_rows.add(
            connection, MetricReport(trial, run, "training", step, {"loss": step / 9} | values, reported=at)
        )


def test_a_store_grows_while_it_is_read(tmp_path: Path) -> None:
    """New reports, out of order too; those that a later run takes back; and those with the numbers
    of a deleted experiment's."""
    directory = samples.store(tmp_path / "master")
    source, database = StoreSource(directory), Database(directory.database)
    before, log = source.version(), source.log("5")
    trained = source.run("5").training
    assert len(next(log)) == 60 and next(log) == []
    with database.transaction() as connection:
        reports(connection, 5, [90, 70, 80, 80], new=1.0)
    logs.append(logs.path_of(directory.trial_logs(5), 1), [logs.entry("done", samples.STARTED + 70)])
    assert source.version() != before and [line.text for line in next(log)] == ["done"]
    after = source.run("5")
    assert trained is not None and after.training is not None and "new" in {one.name for one in after.progress}
    assert after.training.steps == (*trained.steps, 70.0, 80.0, 90.0) and after.training.values[-1] == 10.0

    with database.transaction() as connection:
        again = MetricReport(5, 2, "training", 75, {"loss": 7.0}, reported=samples.STARTED)
        trial_rows.change(connection, 5, run_id=2)
        metric_rows.archive_repeated(connection, again)
        metric_rows.add(connection, again)
    training = source.run("5").training
    assert training is not None and training.steps == (*trained.steps, 70.0, 75.0) and training.values[-1] == 7.0

    with database.transaction() as connection:
        number = experiment_rows.add(connection, replace(next(experiment_rows.all_(connection)), id=0), b"")
        other = replace(trial_rows.of_experiment(connection, 2)[0], id=0, experiment_id=number, task_id="x")
        reports(connection, trial_rows.add(connection, other), range(1, 41))
    assert source.sweep(str(number), ("training", "loss")).trials[0].curve.steps[-1] == 40
    with database.transaction() as connection:
        experiment_rows.erase(connection, number)
        reports(connection, 5, range(1000, 1040), run=2)
    training = source.run("5").training
    assert training is not None and training.steps[-41:] == (75.0, *range(1000, 1040))
    database.close()


def test_speed_is_that_of_the_newest_run(tmp_path: Path) -> None:
    play(tmp_path / "db", {**CONFIG, "searcher": {**CONFIG["searcher"], "max_trials": 1}})
    database = Database(tmp_path / "db")
    for run, steps, speed in ((2, [100], None), (2, [100, 130], 16.0)):
        with database.transaction() as connection:
            reports(connection, 1, steps[-1:], run=run)
        assert from_master_store(tmp_path / "db", 1).trials[0].throughput == speed
    database.close()
