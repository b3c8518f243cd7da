"""``zero-trial ckpt verify``: 0 and a line, or 5 and what is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.test_damage import flip
from tests.checkpoint.test_shelf import trial
from zero_trial.cli.main import main
from zero_trial.runs.checkpoints import METADATA, add_checksums


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (4, 8):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000012.tmp-1").mkdir()
    return tmp_path


def test_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["whole"]
    assert main(["ckpt", "verify", str(run), "--all"]) == 0
    out = capsys.readouterr()
    assert [line.split()[0] for line in out.out.splitlines()] == ["whole", "whole"] and out.err == ""


def test_broken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "checkpoints/step-000004/model0/rank-00000.safetensors")
    assert main(["ckpt", "verify", str(run)]) == 0, "the newest one is whole"
    assert main(["ckpt", "verify", str(run), "--all", "--json"]) == 5
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["checkpoints"]
    assert [(one["step"], one["whole"]) for one in found] == [(4, False), (8, True)]
    assert found[0]["damage"][0]["tensors"] == ["param/w", "state/exp_avg/w"]
    assert main(["ckpt", "verify", str(run / "checkpoints/step-000004")]) == 5
    err = capsys.readouterr().err
    assert "rank-00000.safetensors: its content has changed" in err
    assert "2 tensors lie in it: param/w, state/exp_avg/w" in err


def test_the_newest_is_verified_also_where_it_is_seen_to_be_broken(run: Path) -> None:
    (run / "checkpoints/step-000008/model0/rank-00000.safetensors").unlink()
    assert main(["ckpt", "verify", str(run)]) == 5


def test_of_several_trials_there_is_no_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, name in ((1, "31"), (2, "32")):
        trial(tmp_path, step, trial_id=name)
    assert main(["ckpt", "verify", str(tmp_path)]) == 2
    assert "checkpoints of 2 trials lie here" in capsys.readouterr().err
    assert main(["ckpt", "verify", str(tmp_path), "--all"]) == 0


def test_nothing_but_leftovers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tmp-1").mkdir()
    assert main(["ckpt", "verify", str(tmp_path)]) == 2
    assert "no finished checkpoint" in capsys.readouterr().err


def test_what_a_trial_has_written_beside_its_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed digit that is JSON still: a run would not go on from it."""
    folder = trial(tmp_path, 4)
    (folder / "trial_state.json").write_text('{"step": 4}')
    metadata = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps(add_checksums(metadata, folder)))
    assert main(["ckpt", "verify", str(folder)]) == 0
    (folder / "trial_state.json").write_text('{"step": 5}')
    assert main(["ckpt", "verify", str(folder)]) == 5
    assert "trial_state.json: the file is damaged" in capsys.readouterr().err
