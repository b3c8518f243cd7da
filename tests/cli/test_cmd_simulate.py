"""``zero-trial simulate`` and ``schedule``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_trial.cli import cmd_simulate
from zero_trial.cli.main import main
from zero_trial.pipeline.schedule import RECIPES

ROOT = Path(__file__).parents[2]
SEARCHES = sorted(path for path in (ROOT / "experiments").rglob("*.yaml") if path.name != "const.yaml")
ASHA = """
name: s
entrypoint: python3 -m zero_trial.run model_def:T
searcher: {name: adaptive_asha, metric: loss, max_trials: 16, max_time: 16, time_metric: batches}
hyperparameters: {lr: {type: log, base: 10, minval: -4, maxval: -1}}
reproducibility: {experiment_seed: 3}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "search.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets of 3 and 2 rungs with 12 and 4 trials (see test_adaptive_asha.py)."""
    assert main(["simulate", written(tmp_path, ASHA)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "search  adaptive_asha: 16 trials of 16 batches"
    rows = [[int(word) for word in line.split()] for line in lines[2:7]]
    assert [row[-3] for row in rows] == [1, 4, 16, 4, 16]  # units of the rungs
    assert rows[0][0] == 1 and rows[3][0] == 2  # a bracket is named once
    assert (rows[0][-2], rows[3][-2]) == (12, 4)
    for upper, lower in ((rows[1], rows[0]), (rows[2], rows[1]), (rows[4], rows[3])):
        assert upper[-2] == lower[-2] - lower[-1]  # who is not stopped goes on
    assert lines[7].startswith("spent   ") and " of 256 batches" in lines[7]
    assert lines[8] == "pruned  0 points"


def test_json_and_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = written(tmp_path, ASHA), []
    for more in ([], ["--trials-seed", "3"], ["--trials-seed", "4"], ["--metric-curve", "crossing"]):
        assert main(["simulate", path, "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[2]["best"] != found[0]["best"] and found[3]["curve"] == "crossing"
    assert (found[0]["trials"], found[0]["whole"], found[0]["unit"], found[0]["seed"]) == (16, 256, "batches", 3)
    assert 0 < found[0]["spent"] < 256


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.parent.name)
def test_the_searches_of_this_project(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = ["--length", "200"] if path.parent.name == "hf_trainer" else []  # a script says itself how long it runs
    assert main(["simulate", str(path), "--json", *length]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["failed"] and found["warnings"] == []
    assert bool(found["pruned"]) is (path.parent.name == "random_search")
    assert (found["spent"] < found["whole"]) is (path.parent.name == "adaptive_asha")


def test_pruned_points_are_counted_with_their_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "ds.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    text = ASHA.replace(
        "hyperparameters: {", "data: {ds_config: ds.json}\nhyperparameters: {global_batch_size: 8, ds_config: {"
    )
    text = text.replace(
        "lr: {type: log", "train_micro_batch_size_per_gpu: {type: categorical, vals: [8, 16]}}, lr: {type: log"
    )
    path = written(tmp_path, text)
    assert main(["simulate", path]) == 2
    assert "ds.json is not in" in (error := capsys.readouterr().err) and "Add the model's folder" in error
    assert main(["simulate", path, str(tmp_path / "model")]) == 0
    shown = capsys.readouterr().out
    assert ", whose ds_config cannot be reconciled" in shown and "x train_batch_size 8 ≠ micro 16" in shown
    assert "7 trials of 16 batches" in shown and "pruned  9 points" in shown  # what is pruned counts


def test_a_search_without_a_length_asks_for_one_and_old_forms_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeless = ASHA.replace("adaptive_asha", "random").replace(", max_time: 16, time_metric: batches", "")
    path = written(tmp_path, timeless)
    assert main(["simulate", path]) == 2
    assert "does not set the length of a trial. Write --length 1000, in batches." in capsys.readouterr().err
    assert main(["simulate", path, "--length", "10"]) == 0
    assert "spent   160 of 160 batches" in capsys.readouterr().out
    assert main(["simulate", path, "--length", "0"]) == 2
    assert main(["simulate", written(tmp_path, ASHA.replace("max_time: 16,", "stop_once: true, max_time: 16,"))]) == 0
    assert "note    searcher.stop_once has no effect" in capsys.readouterr().out
    capsys.readouterr()
    for text, message in (
        ("name: [", "not readable as YAML"),
        (ASHA + "max_restarts: -1\n", "<config>.max_restarts: -1 is less than 0"),
        (None, "cannot be read: No such file or directory."),
    ):
        assert main(["simulate", str(tmp_path / "none.yaml") if text is None else written(tmp_path, text)]) == 2
        assert message in capsys.readouterr().err


TWO_BY_TWO = ["--stages", "2", "--micro-batches", "2"]


def test_all_that_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["schedule", "1f1b", *TWO_BY_TWO, "--zero", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:9] == [
        "schedule  1f1b · 2 pipeline stages · 2 micro-batches · 1 chunk per rank · ZeRO stage 3 · reduce: boundary · parameters: hold",
        "bubble    33.3%: 9 units of time, of which a rank is busy 6",
        "",
        "rank 0  F0 F1 .  .  B0 -  .  B1 -",
        "rank 1  .  F0 B0 -  F1 B1 -  .  .",
        "",
        "rank  chunks  idle  activations  parameters  gradients  gathers  reductions  volume  messages",
        "   0       0     3            2           1          1        1           1       2         2",
        "   1       1     3            1           1          1        1           1       2         2",
    ]


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]):
    words = ["schedule", "interleaved", *TWO_BY_TWO, "--chunks", "3", "--zero", "3", "--policy", "free"]
    assert main([*words, "--tied", "--json", "--costs", "2", "1", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["chunks"], body["parameters"], body["reduction"]) == (3, "free", "micro")
    assert body["ranks"][1]["chunks"] == [1, 3, 5] and body["ranks"][1]["volume"] == 3 * 2
    assert body["makespan"] == (3 * 2 + 1) * 4
    assert body["actions"][1][-2:] == ["5TIED_REDUCE0", "STEP"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipedream"], "error   pipeline.schedule: unknown schedule: got 'pipedream'"),
        (["1f1b", "--chunks", "2"], "this schedule has a fixed number of chunks per rank"),
        (["1f1b", "--zero", "2", "--policy", "hold"], "parameters are only freed at ZeRO stage 3"),
    ],
)
def test_user_errors_are_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["schedule", *words, *TWO_BY_TWO]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_the_help_names_every_schedule():
    """It lists them without importing them."""
    assert cmd_simulate._SCHEDULES.split(", ") == list(RECIPES)
