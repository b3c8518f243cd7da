"""Which checkpoint a folder on the command line means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.test_shelf import trial
from zero_trial.cli.ckpt_choice import choose, only_engine
from zero_trial.errors import CheckpointError, ConfigError


def test_the_newest_whole_one_of_a_run(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        trial(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints/step-000012/model0/rank-00000.safetensors").unlink()
    saved = choose(tmp_path)
    assert saved.step == 8
    assert only_engine(saved).folder == tmp_path / "checkpoints/step-000008/model0"
    with pytest.raises(CheckpointError, match="a file is missing"):
        choose(tmp_path / "checkpoints/step-000012")


def test_where_none_is_whole(tmp_path: Path) -> None:
    (trial(tmp_path, 4) / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint here is whole: got .*metadata\.json"):
        choose(tmp_path)


def test_several_models_and_none(tmp_path: Path) -> None:
    saved = choose(trial(tmp_path, 4, models=2))
    with pytest.raises(ConfigError, match=r"the trial has 2 models: got model0, model1\. Name one: .*model0"):
        only_engine(saved)
    assert only_engine(choose(tmp_path / "step-000004/model1")).folder.name == "model1"
    by_itself = trial(tmp_path, 5)
    shutil.rmtree(by_itself / "model0")
    with pytest.raises(ConfigError, match="no engine has saved anything"):
        only_engine(choose(by_itself))


def test_checkpoints_of_several_trials(tmp_path: Path) -> None:
    for step, name in ((1, "a"), (2, "b")):
        trial(tmp_path, step, trial_id=name)
    with pytest.raises(ConfigError, match="checkpoints of 2 trials lie here"):
        choose(tmp_path)
    assert choose(tmp_path / "step-000001").step == 1
