"""A sweep read from a master's store, against what really happened while it was searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.searched import CONFIG, DS_CONFIG, context, play
from zero_trial.ds_config.overlay import overwrite_ds_config
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import read_experiment
from zero_trial.master.records import MetricReport
from zero_trial.report.data import RungOutcome, Tone
from zero_trial.report.master_reader import from_master_store, member, steps_per_second


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
    truth = play(tmp_path / "db", pruned=3)
    report = from_master_store(tmp_path / "db", 1)
    assert report.pruned == (("train_batch_size 6 is not 2 x 2", 3),)
    assert sorted(trial.id for trial in report.trials if trial.pruned) == sorted(truth.pruned)


def test_the_best_configuration_runs(tmp_path: Path) -> None:
    """It is read as an experiment of one trial, and its ds_config is that of the winner, with nothing left of the sweep."""
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


def test_a_grid_has_trials_and_no_ladders(tmp_path: Path) -> None:
    searcher = {"name": "random", "metric": "validation_loss", "max_trials": 3, "max_length": {"batches": 15}}
    from tests.report.searched import _experiment, _trial
    from zero_trial.master.search import Create, build
    from zero_trial.master.store import Database, experiments, trials

    config: dict[str, Any] = {**CONFIG, "searcher": searcher}
    database = Database(tmp_path / "db")
    with database.transaction() as connection:
        experiments.add(connection, _experiment(config), context({}))
        search = build(searcher, config["hyperparameters"], 1)
        for action in search.start():
            if isinstance(action, Create):
                trials.add(connection, _trial(1, action))
        experiments.change(connection, 1, snapshot=search.snapshot())
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
    archive = context({"a/ds.json": json.dumps(DS_CONFIG), "big": "x" * (2**20 + 1)})
    assert json.loads(member(archive, "./a/ds.json") or "") == DS_CONFIG
    assert member(archive, "big") is None
    assert member(archive, "../ds.json") is None
    assert member(b"no archive", "a") is None


def test_speed_is_measured_within_a_run_only() -> None:
    def told(run: int, steps: int, at: float) -> MetricReport:
        return MetricReport(1, run, "training", steps, {}, reported=at)

    assert steps_per_second([told(1, 10, 0.0), told(1, 30, 4.0)]) == 5.0
    assert steps_per_second([told(1, 10, 0.0), told(2, 30, 1000.0), told(2, 40, 1002.0)]) == 5.0
    assert steps_per_second([told(1, 10, 0.0)]) is None
