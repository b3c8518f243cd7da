"""A run, or a folder of runs, read into a report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.report import samples
from tests.report.samples import RESOLVED
from zero_trial.errors import ConfigError
from zero_trial.report.report_data import Status, Tone
from zero_trial.report.run_page import render_run
from zero_trial.report.run_reader import RunsSource, from_run_folder, from_runs, is_run
from zero_trial.report.sweep_page import render_sweep

LOCK = "name: small\nsearcher: {name: single, metric: validation_loss}\ndata: {ds_config: {zero_optimization: {stage: 2}}}\n"


def train(step: int, loss: float, **more: Any) -> dict[str, Any]:
    speeds = {"lr": 0.1 / step, "samples_per_second": 10.0 * step}
    return {"kind": "train", "time": 100.0 + step, "step": step, "total_steps": 4, "loss": loss, **speeds, **more}


def start(step: int, time: float = 100.0) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "total_steps": 4, "parameters": 1234, "global_batch_size": 16}


def validation(step: int, loss: float, **more: float) -> dict[str, Any]:
    metrics = {**more, "validation_loss": loss, "batches": step}
    return {"kind": "validation", "step": step, "time": 100.5 + step, "metrics": metrics}


def make(folder: Path, events: Sequence[dict[str, Any]], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "config.lock.yaml").write_text(LOCK)
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


SUMMARY = {"end": "completed", "step": 4, "total_steps": 4, "train_seconds": 61.0, "tokens_per_second": 13127.6} | {
    "ranks": 2,
    "zero_stage": 2,
    "seed": 7,
    "repeat": "zero-trial run runs/1/config.lock.yaml",
    "initial_validation": {"validation_loss": 3.0, "val_bits_per_byte": 8.1},
    "final_validation": {"validation_loss": 1.5, "val_bits_per_byte": 2.8},
    "unigram_bits_per_byte": 4.7,
    "chance_validation_loss": "unknown",
    "peak_memory_bytes": [4096, 2048],
    "memory_planned_bytes": 1000,
    "memory_measured_peak_bytes": 990,
    "data": {"source": "stdlib", "sha256": "b2113098c49ca4da"},
}


def test_a_finished_run(tmp_path: Path) -> None:
    plan = {"kind": "plan", "time": 101.0, "figures": {"parameters": 400, "optimizer": 600, "peak": 1000}}
    saved = {"kind": "checkpoint", "time": 105.0, "step": 4, "storage_id": "step-000004", "bytes": 77}
    trained = [validation(0, 3.0), train(1, 3.0), train(4, 1.0, grad_norm=0.5), validation(4, 1.5)]
    events = [start(0), plan, *trained, saved]
    folder = make(tmp_path / "0007", events, summary=SUMMARY, resolved_config=RESOLVED)
    (folder / "checkpoints" / "step-000004").mkdir(parents=True)
    report = from_run_folder(folder)
    assert (report.title, report.subtitle) == ("small", "run 0007 · started 1970-01-01 00:01 UTC")
    assert (report.status.word, report.status.tone) == ("completed", Tone.GOOD)
    assert report.training is not None and report.training.values == (3.0, 1.0)
    assert {series.name: series.values for series in report.progress} == {
        "learning rate": (0.1, 0.025),
        "gradient norm": (0.5,),
        "samples per second": (10.0, 40.0),
    }
    (curve,) = report.validation
    assert (curve.name, curve.steps, curve.values) == ("validation_loss", (0.0, 4.0), (3.0, 1.5))
    loss, bits = report.changes
    assert (loss.before, loss.after, loss.best, loss.baselines) == (3.0, 1.5, 1.5, ())
    assert bits.baselines == (("unigram", 4.7),) and bits.best is None
    shown = {"steps": "4 of 4", "ranks": "2", "tokens per second": "13.1k", "trained for": "1 min 1 s"}
    assert dict(report.facts) | shown == dict(report.facts)
    assert (report.memory.planned, report.memory.measured, report.memory.processes) == (1000, 990, (4096, 2048))
    assert report.memory.parts["optimizer"] == 600
    earlier = [
        {"kind": "memory", **of} for of in ({"memory_measured_peak_bytes": 995}, {"peak_memory_bytes": [1, 4000]})
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*earlier, *events]))
    memory = from_run_folder(folder).memory
    assert (memory.measured, memory.processes) == (995, (4096, 4000)), "of the parts before it was resumed, too"
    assert [(one.key, one.given) for one in report.settings] == [("optimizer.type", True), ("bucket", False)]
    assert report.batch[0].key == "ranks"
    assert [(saved.name, saved.bytes, saved.kept) for saved in report.checkpoints] == [("step-000004", 77, True)]
    assert report.repeat == "zero-trial run runs/1/config.lock.yaml"
    assert report.lock == LOCK
    assert "small" in render_run(report)


def test_which_values_count(tmp_path: Path) -> None:
    """Every metric of train_batch, the searcher's first; of a run that is under way, or was killed
    in a line; not of steps that were trained again; and no numbers that cannot be drawn."""
    events = [start(0)]
    events += [train(n, 2.0, each={"loss": [1.0, 3.0], "gap": [0.5, 0.5]}, gap=0.5) for n in (2, 4)]
    found = from_run_folder(make(tmp_path / "run", [*events, validation(4, 1.0, accuracy=0.5)]))
    assert [change.name for change in found.changes] == ["validation_loss", "accuracy"]
    assert found.training is not None and (found.training.low, found.training.high) == ((1.0, 1.0), (3.0, 3.0))
    assert [one.values for one in found.progress if one.name == "gap"] == [(0.5, 0.5)]

    folder = make(tmp_path / "killed", [start(0), validation(0, 3.0), train(1, 3.0)])
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    report = from_run_folder(folder)
    assert report.status.tone is Tone.BUSY and dict(report.facts)["steps"] == "1 of 4"
    assert report.training is not None and len(report.training) == 1 and render_run(report)

    events = [start(0), validation(0, 3.0), train(1, 3.0), train(2, 9.0), validation(2, 8.0), train(3, 9.0)]
    again = [start(1, 200.0), {**train(2, 2.0), "time": 201.0}, {**validation(2, 2.5), "time": 202.0}]
    report = from_run_folder(make(tmp_path / "again", [*events, validation(3, 8.0), *again]))
    assert report.training is not None and report.training.values == (3.0, 2.0)
    assert report.validation[0].values == (3.0, 2.5)

    events = [start(0), train(1, float("nan")), train(2, float("inf")), train(3, 1.0), validation(1, float("nan"))]
    report = from_run_folder(make(tmp_path / "nan", events))
    assert report.training is not None and report.training.steps == (3.0,)
    assert report.validation == () and render_run(report)


def test_a_run_that_failed_or_was_preempted(tmp_path: Path) -> None:
    for code, word, message in (
        (4, "failed", "loss became nan (rank 1, step 3)"),
        (75, "preempted, can be resumed", ""),
    ):
        late = {"rank": 0, "message": "another rank left", "time": 9.0, "exit_code": 5}
        cause = {"rank": 1, "step": 3, "message": "loss became nan", "time": 8.0, "exit_code": code}
        errors = {"errors__rank-0": late, "errors__rank-1": cause}
        report = from_run_folder(make(tmp_path / str(code), [start(0)], **errors))
        assert (report.status.word, report.message) == (word, message)


def test_files_of_nonsense_are_no_traceback(tmp_path: Path) -> None:
    folder = make(tmp_path / "r", [])
    (folder / "events.jsonl").write_bytes(
        b'[1, 2]\n"x"\n{"kind": "train", "step": "two"}\n\xff\xfe\n{"kind": "checkpoint", "step": 1, "storage_id": "../x"}\n'
    )
    (folder / "summary.json").write_text("[]")
    (folder / "resolved_config.json").write_text('{"values": [3, {"nokey": 1}]}')
    (folder / "config.lock.yaml").write_text("{unclosed")
    report = from_run_folder(folder)
    assert (report.title, report.settings, report.training) == ("r", (), None)
    assert not report.checkpoints[0].kept
    assert [part.partition(":")[0] for part in report.left_out] == ["events.jsonl", "summary.json", "config.lock.yaml"]
    assert "Not on this page: summary.json: not a JSON object" in render_run(report)


def _linked(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def _prepended(path: Path, line: str) -> None:
    path.write_text(line + "\n" + path.read_text())


HOSTILE: dict[str, tuple[str, Any]] = {
    "endless": ("events.jsonl", lambda path: _linked(path, "/dev/zero")),
    "endless summary": ("summary.json", lambda path: _linked(path, "/dev/zero")),
    "pipe": ("events.jsonl", lambda path: (path.unlink(), os.mkfifo(path))),
    "pipe summary": ("summary.json", lambda path: (path.unlink(), os.mkfifo(path))),
    "folder": ("events.jsonl", lambda path: (path.unlink(), path.mkdir())),
    "loop": ("events.jsonl", lambda path: _linked(path, path.name)),
    "brackets": ("events.jsonl", lambda path: _prepended(path, "[" * 5000)),
    "long line": ("events.jsonl", lambda path: _prepended(path, "x" * 5000)),
    "sparse": ("events.jsonl", lambda path: os.truncate(path, 1 << 40)),
    "types": (
        "resolved_config.json",
        lambda path: path.write_text('{"values": 3, "batch": [3], "warnings": {"a": 1}}'),
    ),
    "nested lock": ("config.lock.yaml", lambda path: path.write_text("a: " + "[" * 2000)),
    "large lock": ("config.lock.yaml", lambda path: path.write_text("a: [" + "1," * 100_000 + "1]")),
    "list": ("config.lock.yaml", lambda path: path.write_text("- 1")),
    "time is text": ("", lambda path: _prepended(path / "events.jsonl", json.dumps({**train(3, 1.0), "time": "now"}))),
    "time is late": ("", lambda path: _prepended(path / "events.jsonl", json.dumps({**train(3, 1.0), "time": 1e17}))),
    "numbers": (
        "events.jsonl",  # Python's limit for the digits of an integer
        lambda path: _prepended(path, '{"kind": "train", "step": NaN, "loss": 1e400}\n{"a": ' + "9" * 5000 + "}"),
    ),
    "summary": ("", lambda path: (path / "summary.json").write_text('{"parameters": "x", "initial_validation": [1]}')),
    "searcher": ("", lambda path: (path / "config.lock.yaml").write_text("searcher: [1]\nname: {a: 1}")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_one_hostile_file_costs_the_page_that_file_alone(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_trial.report.run_reader._MOST_BYTES", 1 << 20)
    monkeypatch.setattr("zero_trial.report.run_reader._MOST_LOCK", 1 << 16)
    monkeypatch.setattr("zero_trial.trial.runs.events._LONGEST_LINE", 4000)
    file, damage = HOSTILE[case]
    events = [start(0), train(4, 2.0), validation(4, 1.5)]
    folder = make(tmp_path / "r", events, summary=SUMMARY, resolved_config=RESOLVED)
    damage(folder / file)
    report = from_run_folder(folder)
    assert [part.partition(":")[0] for part in report.left_out] == ([file] if file else [])
    assert all(f"Not on this page: {file}" in render_run(report) for _ in report.left_out)
    whole = case in ("pipe", "folder", "endless", "loop")
    assert (report.training is None) == whole == (not report.validation)
    unknown = ("summary", "types", "pipe summary", "endless summary")
    assert dict(report.facts)["steps"].startswith("4") or case in unknown


def run(folder: Path, rate: float, loss: float, metric: str = "validation_loss") -> None:
    events = [start(0), validation(2, loss + 1), train(4, loss), validation(4, loss)]
    make(folder, events, summary=SUMMARY)
    config = {"name": "small", "searcher": {"name": "single", "metric": metric}, "hyperparameters": {"width": 64}}
    data = {"ds_config": {"optimizer": {"params": {"lr": rate}}}, "zero_trial": {"model_dir": f"../{folder.name}"}}
    (folder / "config.lock.yaml").write_text(yaml.safe_dump(config | {"data": data}))


def test_what_differs_is_what_was_swept(tmp_path: Path) -> None:
    for number, (rate, loss) in enumerate(((0.1, 2.0), (0.01, 1.0), (0.001, 3.0))):
        run(tmp_path / f"{number:04d}", rate, loss)
        warnings = {"values": [], "warnings": [f"of {number}"]}
        (tmp_path / f"{number:04d}" / "resolved_config.json").write_text(json.dumps(warnings))
    (tmp_path / "notes").mkdir()
    report = from_runs(tmp_path)
    assert report.status == Status("completed", Tone.GOOD)
    assert [trial.id for trial in report.ranked()] == ["0001", "0000", "0002"]
    assert [axis.name for axis in report.axes] == ["data.ds_config.optimizer.params.lr"]
    assert report.ranked()[0].point == {"data.ds_config.optimizer.params.lr": 0.01}
    assert report.trials[0].steps == 4
    assert report.best is not None and report.best.trial == "0001"
    best = yaml.safe_load(report.best.text)
    assert best["data"] == {"ds_config": {"optimizer": {"params": {"lr": 0.01}}}}
    assert report.notes == ("of 1",) and "of 1" in render_sweep(report)
    run(tmp_path / "0003", 0.1, 1.0, metric="accuracy")
    with pytest.raises(ConfigError, match="different metrics: got accuracy, validation_loss"):
        from_runs(tmp_path)


def test_files_that_cannot_be_read_are_named_and_the_runs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, loss in (("0001", 2.0), ("0002", 1.5), ("0003", 1.0)):
        run(tmp_path / name, 0.1, loss)
    (tmp_path / "0001" / "resolved_config.json").write_text('{"values": 3}')
    closed(monkeypatch, "0002")
    report = from_runs(tmp_path)
    assert [trial.id for trial in report.ranked()] == ["0003", "0001"]
    (lost,) = [trial for trial in report.trials if trial.status == Status("cannot be read", Tone.BAD)]
    assert lost.id == "0002" and "events.jsonl: Permission denied" in lost.left_out
    page = render_sweep(report)
    assert "events.jsonl: Permission denied" in page and "resolved_config.json: TypeError" in page
    assert report.status == Status("1 of 3 failed or cannot be read", Tone.BAD)


def closed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Refuse the folder of a run, even to root."""
    opened, looked_at = os.open, Path.is_file

    def refuse(path: Any) -> None:
        if name in str(path):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", lambda path: refuse(path) or looked_at(path))
    monkeypatch.setattr(os, "open", lambda path, *rest: refuse(path) or opened(path, *rest))


def test_folders_without_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for read, folder, message in (
        (from_run_folder, tmp_path, "folder contains no run"),
        (from_runs, tmp_path, "no runs were found"),
        (from_runs, tmp_path / "none", "no runs were found"),
        (RunsSource, tmp_path / "none", "folder does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(folder)
    empty = RunsSource(tmp_path / "empty")
    assert empty.overview().rows == () and empty.overview().begin
    samples.run(tmp_path / "empty", "0001", 0.001, steps=200)
    assert len(empty.overview().rows) == 1


# What the board asks for.


def test_runs_of_a_folder(runs: Path) -> None:
    source = RunsSource(runs)
    rows = source.overview().rows
    assert [row.name for row in rows] == ["0004", "0003", "0002", "0001"]
    assert [row.status.tone.value for row in rows] == ["busy", "bad", "good", "good"]
    assert (rows[0].done, rows[0].steps, rows[0].metric) == (0.45, "900 of 2000", "validation_loss")
    report = source.run("0001")
    assert {one.name for one in report.progress} >= {"accuracy", "learning rate", "gradient norm"}
    assert report.point()["hyperparameters.lr"] == 0.0005 and not report.experiment
    assert [row.name for row in RunsSource(runs / "0001").overview().rows] == ["0001"]


def test_a_run_grows_and_its_log_follows(tmp_path: Path) -> None:
    folder = samples.run(tmp_path, "0001", 0.001, steps=200, done=False)
    source = RunsSource(tmp_path)
    before, log = source.version(), source.log("0001")
    assert source.run("0001") is source.run("0001")  # nothing was read again
    assert {line.rank for line in next(log)} == {0, 1} and next(log) == []
    with (folder / "events.jsonl").open("a") as file:
        file.write(samples.as_lines(samples.events(0.001, 300, total=2000)[-10:]))
    with (folder / "logs" / "rank-1.log").open("a") as file:
        file.write("one more\nhalf of")
    assert source.version() != before
    training = source.run("0001").training
    assert training is not None and training.steps[-1] == 300.0
    assert [(line.rank, line.text) for line in next(log)] == [(1, "one more")]


@pytest.mark.parametrize("name", samples.TRAVERSALS)
def test_no_name_leads_out_of_the_folder(runs: Path, name: str) -> None:
    source = RunsSource(runs / "0001" / "..")
    for ask in (source.run, source.log, lambda name: source.sweep(name, None)):
        with pytest.raises(ConfigError):
            ask(name)


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

    monkeypatch.setattr("zero_trial.report.run_reader.is_run", listed_and_gone)
    source = RunsSource(tmp_path)
    rows = {row.name: row for row in source.overview().rows}
    assert list(rows) == ["0004", "0002", "0001"]
    assert {rows[name].status.word for name in ("0001", "0002", "0004")} == {"completed"}
    assert "events.jsonl: not a regular file" in rows["0002"].title and "resolved_config.json" in rows["0004"].title
    log = source.log("0002")
    assert "rank-0.log cannot be read: not a regular file" in [line.text for line in next(log)] and not next(log)
