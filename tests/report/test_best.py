"""The best point as an experiment."""

from __future__ import annotations

import copy

import yaml

from tests.report.searched import CONFIG
from zero_trial.experiment.experiment import read_experiment
from zero_trial.report.data import as_yaml
from zero_trial.report.master_reader import as_hyperparameters, best_experiment

POINT = {"global_batch_size": 16, "ds_config": {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}}


def test_one_trial_with_constant_values() -> None:
    before = copy.deepcopy(CONFIG)
    found = best_experiment(CONFIG, POINT, 11, {"zero_optimization": {"stage": 1}})
    assert before == CONFIG
    assert found["searcher"] == {
        "name": "single",
        "metric": "validation_loss",
        "smaller_is_better": True,
        "max_length": {"batches": 60},
    }
    assert found["reproducibility"]["experiment_seed"] == 11
    assert found["data"] == {"ds_config": {"zero_optimization": {"stage": 1}}, "source": "stdlib"}
    experiment = read_experiment(found)
    assert experiment.hyperparameters == POINT
    assert not experiment.searcher.searches


def test_a_nested_type_is_written_as_a_const() -> None:
    assert as_hyperparameters(POINT)["ds_config"]["optimizer"] == {
        "type": "const",
        "val": {"type": "Adam", "params": {"lr": 1e-4}},
    }


def test_the_file_is_read_back_as_it_was_and_its_comment_stays_one() -> None:
    experiment = best_experiment(CONFIG, POINT, None)
    text = as_yaml(experiment, "trial 1\nevil: true")
    assert yaml.safe_load(text) == experiment
    assert text.splitlines()[0] == "# trial 1 evil: true"


def test_a_searcher_that_states_its_length_the_other_way() -> None:
    config = {**CONFIG, "searcher": {"name": "random", "metric": "m", "max_length": {"epochs": 3}}}
    assert best_experiment(config, POINT, None)["searcher"]["max_length"] == {"epochs": 3}
