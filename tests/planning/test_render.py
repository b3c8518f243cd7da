"""How a check is shown."""

from __future__ import annotations

import json
from pathlib import Path

from tests.planning.project import DS_CONFIG, EXPERIMENT, project
from zero_trial.planning.check import CheckReport, check_as_json, render_check


def test_one_line_when_all_is_well(tmp_path: Path):
    report = project(tmp_path).check(build=False, slots=1)
    (line,) = render_check(report)
    assert line.startswith("check   const.yaml ok · model_def:LineTrial ok · ds_config ok · 1 slots on ")
    assert line.endswith(" s")


def test_faults_come_before_warnings(tmp_path: Path):
    config = {**DS_CONFIG, "bfloat16": {"enabled": False}}
    experiment = EXPERIMENT.replace("model_def:LineTrial", "model_def:Other")
    lines = render_check(project(tmp_path, experiment, config).check(build=False, slots=1))
    assert [line[:8] for line in lines] == ["check   ", "error   ", "warn    "]
    assert "const.yaml ok" in lines[0] and "model_def" not in lines[0]


def test_a_fault_marks_its_area(tmp_path: Path):
    lines = render_check(project(tmp_path, ds_config={"train_batch_size": 3}).check(build=False, slots=2))
    assert "ds_config wrong" in lines[0] and lines[1].startswith("error   train_batch_size 3 ≠")


def test_a_search_has_its_own_line(tmp_path: Path):
    experiment = EXPERIMENT.replace("name: single", "name: grid") + "  x: {type: categorical, vals: [1, 2]}\n"
    lines = render_check(project(tmp_path, experiment).check(build=False))
    assert lines[1] == "search  2 points: 2 legal, 0 would be pruned"


def test_nothing_could_be_read():
    assert render_check(CheckReport())[0].startswith("check   nothing could be read")


def test_json(tmp_path: Path):
    body = check_as_json(project(tmp_path, ds_config={"train_batch_size": 3, "gradient_cliping": 1}).check(build=False))
    body = json.loads(json.dumps(body))
    assert (body["ok"], body["exit_code"]) == (False, 2)
    (issue,) = body["issues"]
    assert (issue["file"], issue["line"], issue["key"]) == ("ds_config.json", 3, "gradient_cliping")
    assert issue["fix"].startswith('Did you mean "gradient_clipping"?')
    assert body["points"] == {"total": 1, "looked_at": [{"number": 1, "values": {}}], "legal": [], "pruned": []}
    assert body["looked"]["experiment"] == "const.yaml"
