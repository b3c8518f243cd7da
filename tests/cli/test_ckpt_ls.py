"""``zero-trial ckpt ls``: one line for each checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.test_shelf import engine, trial
from zero_trial.cli.main import main


def test_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (8, 20, 100):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000100/model0/rank-00000.safetensors").write_text("")
    (tmp_path / "checkpoints/step-000120.tmp-1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["ckpt", "ls", "."]) == 0
    out = capsys.readouterr()
    lines = out.out.splitlines()
    assert lines[0] == "checkpoints"
    assert lines[1].split() == ["step", "saved", "(UTC)", "size", "files", "ranks", "stage", "name"]
    words = [line.split() for line in lines[2:]]
    assert [(row[0], *row[5:7], *row[7:]) for row in words[1:]] == [
        ("8", "4", "1", "2", "step-000008", "whole"),
        ("20", "4", "1", "2", "step-000020", "latest"),
        ("100", "4", "1", "2", "step-000100", "broken"),
    ]
    assert words[0][0] == "-" and words[0][-3:] == ["step-000120.tmp-1", "left", "over"]
    assert out.err.startswith("broken  ") and "rank-00000.safetensors: a file is cut short" in out.err


def test_trials_that_share_a_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, name in ((1, "31"), (2, "32"), (3, "31")):
        trial(tmp_path, step, trial_id=name)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert words[0][-1] == "trial"
    assert [row[-2:] for row in words[1:]] == [["31", "whole"], ["32", "latest"], ["31", "latest"]]


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine(tmp_path, "a", 4, mesh=[1, 1, 1, 1])
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(tmp_path)
    (one,) = found["checkpoints"]
    assert (one["step"], one["ranks"], one["zero_stage"], one["mesh"]) == (4, 1, 2, [1, 1, 1, 1])
    assert (one["state"], one["latest"], one["fault"], one["files"], one["engines"]) == ("whole", True, None, 2, [])


def test_engines_at_different_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = trial(tmp_path, 4)
    engine(place, "model1", 4, zero_stage=1)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[6:8] == ["1", "2,1"]
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["zero_stage"] == [2, 1]


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(tmp_path / "no")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error   {tmp_path / 'no'}: there is no such folder") and "Traceback" not in err
