"""The verb ``check``: its output, its exit codes, and how fast it is to start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planning.project import DS_CONFIG, EXPERIMENT, MODEL, project
from zero_trial.cli.main import main


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_good_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = project(tmp_path)
    assert main(["check", str(made.experiment), str(tmp_path), "--slots", "1", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("check   const.yaml ok · model_def:LineTrial ok · ds_config ok")
    assert "reports validation_loss" in captured.out and captured.err == ""


def test_faults_are_2_and_go_to_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = project(tmp_path, ds_config={**DS_CONFIG, "gradient_cliping": 1})
    assert main(["check", str(made.experiment), str(tmp_path)]) == 2
    assert "\nerror   ds_config.json:9 gradient_cliping: unknown key." in capsys.readouterr().out


def test_a_fault_of_the_code_is_1(tmp_path: Path):
    made = project(tmp_path, model=MODEL.replace("import torch\n", "import torch\nno_such_name\n"))
    assert main(["check", str(made.experiment), str(tmp_path)]) == 1
    assert main(["check", str(made.experiment), str(tmp_path), "--no-build"]) == 0


def test_json_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made = project(tmp_path, EXPERIMENT.replace("LineTrial", "Other"), model=f"print('hello')\n{MODEL}")
    assert main(["check", str(made.experiment), str(tmp_path), "--json"]) == 2
    body = json.loads(capsys.readouterr().out)
    (issue,) = body["issues"]
    assert (issue["area"], issue["file"], issue["line"]) == ("entrypoint", "const.yaml", 2)
