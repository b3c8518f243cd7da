"""The lock file repeats a run: what was resolved stands in it, and it can be read as an experiment."""

from __future__ import annotations

from pathlib import Path

import yaml

from zero_trial.experiment.experiment import read_experiment
from zero_trial.runs.provenance import LockedFacts, locked_model_dir, write_lock

EXPERIMENT = """
name: tiny
entrypoint: model_def:MyTrial
searcher: {name: single, metric: loss, max_length: {batches: 3}}
hyperparameters: {lr: 0.1}
data: {ds_config: ds.json, source: texts}
"""


def locked(tmp_path: Path) -> Path:
    (tmp_path / "const.yaml").write_text(EXPERIMENT)
    (tmp_path / "runs" / "0001").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    experiment = read_experiment(tmp_path / "const.yaml")
    return write_lock(
        tmp_path / "runs" / "0001", experiment, LockedFacts(tmp_path / "model", 3, 11), {"train_batch_size": 6}
    )


def test_what_is_locked(tmp_path: Path):
    content = yaml.safe_load(locked(tmp_path).read_text())
    assert content["resources"]["slots_per_trial"] == 3
    assert content["reproducibility"]["experiment_seed"] == 11
    assert content["data"]["ds_config"] == {"train_batch_size": 6}
    assert (content["data"]["source"], content["hyperparameters"], content["name"]) == ("texts", {"lr": 0.1}, "tiny")
    assert content["data"]["zero_trial"]["versions"]["torch"]


def test_a_lock_is_an_experiment_that_knows_its_model(tmp_path: Path):
    path = locked(tmp_path)
    experiment = read_experiment(path)
    assert (experiment.slots_per_trial, experiment.experiment_seed) == (3, 11)
    assert locked_model_dir(experiment) == tmp_path / "model"
    assert experiment.ds_config(tmp_path / "model").value == {"train_batch_size": 6}


def test_a_project_can_be_moved(tmp_path: Path):
    (tmp_path / "a").mkdir()
    locked(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    experiment = read_experiment(tmp_path / "b" / "runs" / "0001" / "config.lock.yaml")
    assert locked_model_dir(experiment) == tmp_path / "b" / "model"


def test_an_experiment_is_no_lock(tmp_path: Path):
    locked(tmp_path)
    assert locked_model_dir(read_experiment(tmp_path / "const.yaml")) is None
