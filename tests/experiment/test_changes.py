"""Settings on a command line: where each lands, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import ExperimentConfig, read_experiment, read_words

EXPERIMENT: dict[str, Any] = {
    "entrypoint": "model_def:T",
    "searcher": {"name": "single", "metric": "m", "max_length": {"batches": 9}},
    "hyperparameters": {"global_batch_size": 8, "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1}},
    "data": {"ds_config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 0}}},
}


def changed(line: str) -> ExperimentConfig:
    return read_experiment(EXPERIMENT, changes=read_words(line.split()).changes)


def test_paths_stand_beside_settings():
    words = read_words(["c.yaml", "zero_optimization.stage=3", "m"])
    assert (words.experiment_path, words.model_dir) == (Path("c.yaml"), Path("m"))


def test_a_file_with_an_equals_sign_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("trainer=deepspeed").touch()
    assert read_words(["trainer=deepspeed"]).experiment_path == Path("trainer=deepspeed")


def test_values_land_in_the_experiment_and_the_ds_config():
    words = (
        "trainer=zero_3_offload zero_optimization.offload_param=null optimizer.type=Lamb optimizer.params.lr=1e-4 "
        "hyperparameters.global_batch_size=16 searcher.max_length.batches=3 resources.slots_per_trial=2"
    )
    config = changed(words)
    ds_config = read_ds_config(config.ds_config("."))
    zero = ds_config.zero_optimization
    assert (zero.stage, zero.offload_optimizer.device, zero.offload_param) == (3, "cpu", None)
    assert (ds_config.optimizer.type, ds_config.optimizer.params["lr"]) == ("Lamb", 1e-4)
    assert config.hyperparameters["global_batch_size"] == 16
    assert config.searcher.max_length is not None and config.searcher.max_length.count == 3
    assert config.slots_per_trial == 2


def test_a_range_may_become_a_value_and_a_preset_a_base():
    assert changed("hyperparameters.lr=0.5").search_space == ()
    config = changed("data.ds_config=zero_2_offload")
    assert read_ds_config(config.ds_config(".")).zero_optimization.offload_optimizer.device == "cpu"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("a b c", "c"),
        ("trainer=zero_1 trainer=zero_2", "given twice"),
        ("task=nlp/translation", "neither an experiment nor a ds_config"),
        ("traner=zero_1", "Did you mean trainer?"),
        ("zero_optimisation.stage=1", "Did you mean zero_optimization?"),
        ("hyperparameters.lr.minval=3", "hyperparameters.lr"),
        ("hyperparameters.global_batch_size.x=3", "hyperparameters.global_batch_size"),
    ],
)
def test_what_is_refused(line: str, part: str):
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        changed(line)


def test_a_wrong_preset_names_the_command_line():
    with pytest.raises(ConfigError, match=r"command line hyperparameters\.trainer"):
        changed("trainer=zero3").ds_config(".")
