"""What the board reads: a master's store, and folders of runs while they grow."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.board import samples
from zero_trial.errors import ConfigError
from zero_trial.master import logs
from zero_trial.master.records import MetricReport
from zero_trial.master.store import Database, experiment_rows, metric_rows, trial_rows
from zero_trial.report.board.board_source import RunsSource, StoreSource
from zero_trial.report.run_reader import is_run
from zero_trial.report.store_curves import StoreCurves

TRAVERSALS = ("..", "../0001", "/etc", "0001/..", "0001/logs", "", ".", "%2e%2e", "\0", "0001\n")


def test_runs_of_a_folder(tmp_path: Path) -> None:
    source = RunsSource(samples.runs(tmp_path / "runs"))
    rows = source.overview().rows
    assert [row.name for row in rows] == ["0004", "0003", "0002", "0001"]
    assert [row.status.tone.value for row in rows] == ["busy", "bad", "good", "good"]
    assert (rows[0].done, rows[0].steps, rows[0].metric) == (0.45, "900 of 2000", "validation_loss")
    report = source.run("0001")
    assert {one.name for one in report.progress} >= {"accuracy", "learning rate", "gradient norm"}
    assert source.experiment_of("0001") is None
    found = source.compare(["0001", "0002"])
    assert [axis.name for axis in found.axes] == ["hyperparameters.lr", "data.ds_config.zero_optimization.stage"]


def test_a_run_grows_and_its_log_follows(tmp_path: Path) -> None:
    folder = samples.run(tmp_path, "0001", 0.001, steps=200, done=False)
    source = RunsSource(tmp_path)
    before, log = source.version(), source.log("0001")
    assert source.run("0001").training is source.run("0001").training  # nothing was read again
    assert {line.rank for line in log.new()} == {0, 1} and log.new() == []
    with (folder / "events.jsonl").open("a") as file:
        file.write(samples.as_lines(samples.events(0.001, 300, total=2000)[-10:]))
    with (folder / "logs" / "rank-1.log").open("a") as file:
        file.write("one more\nhalf of")
    assert source.version() != before
    training = source.run("0001").training
    assert training is not None and training.steps[-1] == 300.0
    assert [(line.rank, line.text) for line in log.new()] == [(1, "one more")]


def test_a_folder_that_is_a_run_and_one_without_any(tmp_path: Path) -> None:
    samples.run(tmp_path, "0001", 0.001, steps=200)
    assert [row.name for row in RunsSource(tmp_path / "0001").overview().rows] == ["0001"]
    (tmp_path / "empty").mkdir()
    empty = RunsSource(tmp_path / "empty")
    assert empty.overview().rows == () and empty.overview().begin
    samples.run(tmp_path / "empty", "0001", 0.001, steps=200)
    assert len(empty.overview().rows) == 1
    with pytest.raises(ConfigError):
        RunsSource(tmp_path / "nowhere")


@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    samples.run(tmp_path, "0001", 0.001, steps=200)
    source = RunsSource(tmp_path / "0001" / "..")
    for ask in (source.run, source.log, lambda name: source.compare([name]), lambda name: source.sweep(name, None)):
        with pytest.raises(ConfigError):
            ask(name)


def test_a_masters_store(tmp_path: Path) -> None:
    directory = samples.store(tmp_path / "master")
    source = StoreSource(directory)
    rows = source.overview().rows
    assert [(row.name, row.status.word, row.done) for row in rows] == [("2", "active", 0.42), ("1", "completed", 1.0)]
    report, names = source.sweep("1", None)
    assert report.ladders and len(report.trials) == 16
    assert ("training", "accuracy") in names and ("validation", "validation_loss") in names
    drawn, _ = source.sweep("1", ("training", "accuracy"))
    longest = max(drawn.trials, key=lambda trial: trial.steps)
    assert drawn.drawn == "training accuracy" and len(longest.curve) > 50
    assert [trial.best for trial in drawn.trials] == [trial.best for trial in report.trials]
    trial = source.run(longest.id)
    assert trial.training is not None and {one.name for one in trial.progress} == {"accuracy", "learning rate"}
    assert [saved.kept for saved in trial.checkpoints] == [False, True, True, True]
    assert {"ds_config.optimizer.params.lr", "optimizer.params", "zero_optimization.reduce_bucket_size"} <= {
        setting.key for setting in trial.settings
    }
    assert "train_micro_batch_size_per_gpu" in {setting.key for setting in trial.batch}
    assert source.experiment_of(longest.id) == "1"
    assert {axis.name for axis in source.compare([longest.id, "3"]).axes} <= {axis.name for axis in report.axes}
    for name in (*TRAVERSALS, "99999", "-1", "1e1", "²"):
        with pytest.raises(ConfigError):
            source.run(name)


def test_a_store_grows_while_it_is_read(tmp_path: Path) -> None:
    directory = samples.store(tmp_path / "master")
    source, log = StoreSource(directory), StoreSource(directory).log("5")
    before, trained = source.version(), source.run("5")
    assert len(log.new()) == 60 and log.new() == []
    database = Database(directory.database)
    with database.transaction() as connection:
        report = MetricReport(5, 1, "training", 70, {"loss": 0.5, "new": 1.0}, reported=samples.STARTED + 70)
        metric_rows.add(connection, report)
    logs.append(logs.path_of(directory.trial_logs(5), 1), [logs.entry("done", samples.STARTED + 70)])
    assert source.version() != before
    database.close()
    after = source.run("5")
    assert trained.training is not None and after.training is not None
    assert (after.training.steps[-1], after.training.values[-1]) == (70.0, 0.5)
    assert len(after.training) == len(trained.training) + 1
    assert "new" in {one.name for one in after.progress}
    assert [line.text for line in log.new()] == ["done"]


def test_a_run_that_goes_or_cannot_be_read_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0001", "0002", "0003", "0004"):
        samples.run(tmp_path, name, 0.001, steps=100)
    (tmp_path / "0002" / "events.jsonl").unlink()
    os.mkfifo(tmp_path / "0002" / "events.jsonl")
    (tmp_path / "0002" / "logs" / "rank-0.log").unlink()
    (tmp_path / "0002" / "logs" / "rank-0.log").symlink_to("/dev/zero")
    (tmp_path / "0004" / "resolved_config.json").write_text('{"values": 3}')

    def listed_and_gone(folder: Path) -> bool:
        found = is_run(folder)
        if folder.name == "0003" and found:
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr("zero_trial.report.board.board_source.is_run", listed_and_gone)
    source = RunsSource(tmp_path)
    rows = {row.name: row for row in source.overview().rows}
    assert list(rows) == ["0004", "0002", "0001"]
    assert {rows[name].status.word for name in ("0001", "0002", "0004")} == {"completed"}
    assert "events.jsonl: not a regular file" in rows["0002"].title and "resolved_config.json" in rows["0004"].title
    log = source.log("0002")
    assert "rank-0.log cannot be read: not a regular file" in [line.text for line in log.new()] and not log.new()


def test_runs_that_are_not_looked_at_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.run(tmp_path, "0001", 0.001, steps=100)
    source = RunsSource(tmp_path)
    held = source.run("0001")
    assert source.run("0001") is held
    monkeypatch.setattr("zero_trial.report.board.board_source.FORGET_SECONDS", -1.0)
    source.version()  # any page looks
    again = source.run("0001")
    assert again is not held and again.training == held.training


def reports(connection: Any, trial: int, steps: Sequence[int], *, group: str = "training", run: int = 1) -> None:
    for step in steps:
        values = {"loss": float(step), "validation_loss": step / 2, "batches": step}
        report = MetricReport(trial, run, group, step, values, reported=samples.STARTED + 1000 * trial + step)
        metric_rows.add(connection, report, step / 2 if group == "validation" else None)


def newest_experiment(connection: Any) -> int:
    """One more experiment with a trial that has reported last of all."""
    number = experiment_rows.add(connection, replace(next(experiment_rows.all_(connection)), id=0), b"")
    found = trial_rows.add(
        connection, replace(trial_rows.of_experiment(connection, 2)[0], id=0, experiment_id=number, task_id="x")
    )
    reports(connection, found, range(1, 41))
    return number


@pytest.mark.parametrize("added", [10, 80], ids=["below the old newest", "above it"])
def test_numbers_of_deleted_reports_are_given_again(tmp_path: Path, added: int) -> None:
    directory = samples.store(tmp_path / "master")
    source, database = StoreSource(directory), Database(directory.database)
    with database.transaction() as connection:
        number = newest_experiment(connection)
    before, drawn = source.run("5"), source.sweep("1", ("training", "accuracy"))[0]
    with database.transaction() as connection:
        experiment_rows.erase(connection, number)
        reports(connection, 5, range(1000, 1000 + added))
        reports(connection, 5, [2000], group="validation")
    after, fresh = source.run("5"), StoreSource(directory)
    database.close()
    assert before.training is not None and after.training is not None
    assert len(after.training) == len(before.training) + added
    assert after == replace(fresh.run("5"), created=after.created)
    for each in (None, ("training", "loss")):
        found, expected = source.sweep("1", each)[0], fresh.sweep("1", each)[0]
        assert (found.trials, found.ladders) == (expected.trials, expected.ladders)
    assert drawn.trials != source.sweep("1", ("training", "loss"))[0].trials


def test_a_later_run_of_an_unmanaged_trial_takes_back_what_it_repeats(tmp_path: Path) -> None:
    directory = samples.store(tmp_path / "master")
    source, database = StoreSource(directory), Database(directory.database)
    with database.transaction() as connection:
        trial = trial_rows.of_experiment(connection, 2)[0].id
        reports(connection, trial, [1010, 1020, 1030])
        reports(connection, trial, [1015, 1025], group="validation")
        trial_rows.change(connection, trial, run_id=2)
    before = source.run(str(trial))
    with database.transaction() as connection:
        again = MetricReport(trial, 2, "training", 1010, {"loss": 7.0}, reported=samples.STARTED)
        metric_rows.archive_repeated(connection, again)
        metric_rows.add(connection, again)
    after = source.run(str(trial))
    database.close()
    assert before.training is not None and after.training is not None
    assert before.training.steps[-1] == 1030.0 and before.validation[0].steps[-1] == 1025.0
    assert (after.training.steps[-1], after.training.values[-1]) == (1010.0, 7.0)
    assert after.validation[0].steps[-1] < 1000.0


def test_a_trial_without_values_of_a_metric_has_no_curve_of_it(tmp_path: Path) -> None:
    source = StoreSource(samples.store(tmp_path / "master"))
    assert any(len(trial.curve) for trial in source.sweep("1", None)[0].trials)
    assert not any(len(trial.curve) for trial in source.sweep("1", ("training", "never seen"))[0].trials)


def test_many_trials_are_read_at_once_as_each_by_itself(tmp_path: Path) -> None:
    """Reports that alternate, that come out of order or twice, and those without the metric; and
    what is new since the last look."""
    directory = samples.store(tmp_path / "master")
    database, many = Database(directory.database), StoreCurves()
    with database.transaction() as connection:
        known = trial_rows.of_experiment(connection, 1)
        for step in (900, 910, 905, 910, 920):
            for place, trial in enumerate(known):
                values = {"other": 1} if step == 920 and place else {"loss": step + place / 7}
                metric_rows.add(connection, MetricReport(trial.id, 1, "training", step, values, reported=step))
    for step in (930, 925):
        with database.reading() as connection:
            many.refresh(connection)
            many.ahead(connection, known, "training", "loss", goal=False)
            asked: list[str] = []
            connection.set_trace_callback(asked.append)
            curves = [many.group(connection, trial, "training", "loss")["loss"] for trial in known]
            connection.set_trace_callback(None)
            assert step == 930 or not asked
            for trial, curve in zip(known, curves, strict=True):
                found, single = curve.series("loss"), StoreCurves()
                single.refresh(connection)
                assert found == single.group(connection, trial, "training", "loss")["loss"].series("loss")
                assert 905.0 in found.steps and found.steps == tuple(sorted(set(found.steps)))
                assert (930.0 in found.steps) is (step == 925)
        with database.transaction() as connection:
            for place, trial in enumerate(known):
                values = {"loss": step + place / 7}
                metric_rows.add(connection, MetricReport(trial.id, 1, "training", step, values, reported=step))
    database.close()
