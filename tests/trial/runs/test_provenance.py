"""What a run was made with is noted at every start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

import zero_trial
from zero_trial.experiment.experiment import read_experiment
from zero_trial.trial.runs import provenance
from zero_trial.trial.runs.provenance import code_of, locked_model_dir, read_lock, write_lock
from zero_trial.trial.runtime.local import LocalPlatform
from zero_trial.trial.runtime.run_folder import record_provenance


def model(folder: Path) -> Path:
    files = {"model_def.py": "a = 1\n", "deep/er.py": "b = 2\n", "data.csv": "1", ".git/x.py": "", "runs/y.py": ""}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_every_start_has_an_entry(tmp_path: Path) -> None:
    run = LocalPlatform(
        tmp_path / "run", model_dir=model(tmp_path / "m"), seed=7, hparams={"lr": 0.1, "odd": {1: Path("x")}}
    )
    record_provenance(run, torch.device("cpu"))
    (run.model_dir / "model_def.py").write_text("a = 2\n")
    record_provenance(run, torch.device("cpu"))
    first, second = json.loads((tmp_path / "run/certificate.json").read_text())["starts"]
    assert (first["seed"], first["ranks"], first["step"]) == (7, 1, 0)
    assert first["hyperparameters"] == {"lr": 0.1, "odd": {"1": "x"}}
    assert first["versions"]["torch"] == torch.__version__ and first["versions"]["zero_trial"] == zero_trial.__version__
    assert first["machine"]["device"] == "cpu" and first["machine"]["threads"] == torch.get_num_threads()
    assert first["package"] == second["package"] != first["code"]["sha256"]
    changed = {name for name, digest in first["code"]["files"].items() if second["code"]["files"][name] != digest}
    assert changed == {"model_def.py"} and first["code"]["sha256"] != second["code"]["sha256"]


def test_code_is_python_files_and_its_sum_tells_names_and_contents_apart(tmp_path: Path) -> None:
    found = code_of(model(tmp_path / "a"))
    assert sorted(found["files"]) == ["deep/er.py", "model_def.py"] and found["complete"]
    assert code_of(model(tmp_path / "b")) == found
    (tmp_path / "b/deep/er.py").rename(tmp_path / "b/deep/other.py")
    assert code_of(tmp_path / "b")["sha256"] != found["sha256"]


def test_a_folder_that_is_no_folder_of_code_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "MOST_FOLDERS", 1)
    assert not code_of(model(tmp_path))["complete"]


def test_names_and_words_that_yaml_takes_for_booleans_come_back(tmp_path: Path) -> None:
    values = {"entrypoint": "m:T", "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}}}
    experiment = read_experiment({**values, "hyperparameters": {"n": 3, "a": "y", "b": "on"}})
    path = write_lock(tmp_path, experiment, None, model_dir=tmp_path, slots=1, seed=0)
    assert read_experiment(path).hyperparameters == experiment.hyperparameters
    assert read_lock(path.read_text(), path)["hyperparameters"] == experiment.hyperparameters


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
        tmp_path / "runs" / "0001", experiment, {"train_batch_size": 6}, model_dir=tmp_path / "model", slots=3, seed=11
    )


def test_a_lock_is_an_experiment_that_knows_its_model(tmp_path: Path):
    """Also by a link to its folder, and after its project was moved."""
    (tmp_path / "a").mkdir()
    content = yaml.safe_load(locked(tmp_path / "a").read_text())
    assert (content["data"]["source"], content["hyperparameters"], content["name"]) == ("texts", {"lr": 0.1}, "tiny")
    assert content["data"]["zero_trial"]["versions"]["torch"]
    assert locked_model_dir(read_experiment(tmp_path / "a" / "const.yaml")) is None
    moved = tmp_path / "b"
    (tmp_path / "a").rename(moved)
    (moved / "model" / "runs").symlink_to(moved / "runs")
    for runs in (moved / "runs", moved / "model" / "runs"):
        experiment = read_experiment(runs / "0001" / "config.lock.yaml")
        assert (experiment.slots_per_trial, experiment.experiment_seed) == (3, 11)
        assert locked_model_dir(experiment) == moved / "model"
        assert experiment.ds_config(moved / "model").value == {"train_batch_size": 6}
