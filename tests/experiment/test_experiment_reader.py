"""Reading an experiment's YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import examine_experiment, read_experiment
from zero_trial.experiment.sections import Period

WHOLE = """name: my_trial
entrypoint: python3 -m determined.launch.torch_distributed python3 -m zero_trial.run model_def:MyTrial
resources: {slots_per_trial: 2}
searcher: {name: adaptive_asha, metric: val, smaller_is_better: false, max_trials: 8, max_time: 100, time_metric: batches}
hyperparameters: {global_batch_size: 64, lr: {type: log, base: 10, minval: -5, maxval: -3}}
data: {source: stdlib}
min_validation_period: {epochs: 1}
min_checkpoint_period: 50
scheduling_unit: 10
max_restarts: 0
reproducibility: {experiment_seed: 7}
checkpoint_policy: all
records_per_epoch: 1000
perform_initial_validation: true
environment: {anything: 1}
"""


def test_a_whole_file(tmp_path: Path):
    path = tmp_path / "asha.yaml"
    path.write_text(WHOLE)
    read = read_experiment(path)
    assert (read.name, read.slots_per_trial, read.experiment_seed, read.max_restarts) == ("my_trial", 2, 7, 0)
    assert (read.min_validation_period, read.min_checkpoint_period) == (Period("epochs", 1), Period("batches", 50))
    assert (read.scheduling_unit, read.checkpoint_policy, read.records_per_epoch) == (10, "all", 1000)
    assert read.perform_initial_validation and read.data == {"source": "stdlib"}
    searcher = read.searcher
    assert (searcher.name, searcher.metric, searcher.smaller_is_better, searcher.max_length) == (
        "adaptive_asha",
        "val",
        False,
        None,
    )
    assert searcher.rest == {"max_trials": 8, "max_time": 100, "time_metric": "batches"}
    assert searcher.searches and read.search_space == ("lr",)
    assert read.raw["environment"] == {"anything": 1} and read.folder == tmp_path


SMALL = (
    "entrypoint: model_def:T\nsearcher: {name: single, metric: loss, max_length: {batches: 5}}\nhyperparameters: {}\n"
)


def test_defaults_are_determineds(tmp_path: Path):
    path = tmp_path / "const.yaml"
    path.write_text(SMALL)
    read = read_experiment(path)
    assert (read.name, read.slots_per_trial, read.scheduling_unit, read.max_restarts) == ("const", 1, 100, 5)
    assert (read.checkpoint_policy, read.experiment_seed, read.perform_initial_validation) == ("best", None, False)
    assert read.min_validation_period.count == 0 and read.searcher.max_length == Period("batches", 5)
    assert not read.searcher.searches


def test_text_and_dicts_are_read_too():
    assert read_experiment(SMALL, "x.yaml").entrypoint == "model_def:T"
    read = read_experiment({"entrypoint": ["python3", "model_def:T"], "searcher": {"metric": "m"}})
    assert (read.entrypoint, read.name, read.searcher.name) == ("python3 model_def:T", "experiment", "single")


def test_all_faults_come_together():
    text = """name: 3
hyperparametres: {a: 1}
resources: {slots: 1, slot_per_trial: 2}
searcher: {name: asha, max_length: {steps: 4}}
min_validation_period: {batches: -1}
max_restarts: many
data: ds_config.json
my_own: 1
perform_initial_validation: yes please
reproducibility: 7
"""
    with pytest.raises(ConfigError) as error:
        read_experiment(text, "const.yaml")
    head, *lines = str(error.value).splitlines()
    assert head == "13 faults:"
    expected = [
        '  const.yaml:2 hyperparametres: unknown property. Did you mean "hyperparameters"?',
        '  const.yaml:3 resources.slot_per_trial: unknown property. Did you mean "slots_per_trial"?',
        "  const.yaml:8 my_own: unknown property. Settings of your own belong under data: or hyperparameters:.",
        "  const.yaml:10 reproducibility: 7 is not a map.",
        "  const.yaml:4 searcher.metric: there is no metric. Name a metric that evaluation returns, for example validation_loss.",
        '  const.yaml:4 searcher.name: wrong value: got "asha", expected one of "single", "random", "grid", "adaptive_asha", '
        '"adaptive", "adaptive_simple", "sync_halving", "async_halving", "pbt", "custom".',
        "  const.yaml:4 searcher.max_length: wrong value: got {steps: 4}, expected {batches: n}, {epochs: n}, {records: n} or a number of batches.",
        "  const.yaml:1 name: wrong value: got 3, expected a string.",
        "  const.yaml entrypoint: there is no entrypoint: expected module:Class. Write entrypoint: model_def:MyTrial.",
        '  const.yaml:7 data: wrong value: got "ds_config.json", expected an object.',
        "  const.yaml:5 min_validation_period: wrong value: got {batches: -1}, expected {batches: n}, {epochs: n}, {records: n} "
        "or a number of batches. -1 is not a non-negative integer.",
        '  const.yaml:6 max_restarts: wrong value: got "many", expected a non-negative integer.',
        '  const.yaml:9 perform_initial_validation: wrong value: got "yes please", expected true or false.',
    ]
    assert sorted(lines) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("entrypoint: m:T\n", "x.yaml searcher: there is no searcher. Write searcher: {name: single"),
        ("entrypoint: ''\nsearcher: {metric: m}\n", "x.yaml:1 entrypoint: there is no entrypoint"),
        ("entrypoint: m:T\nsearcher: {metric: m}\nhyperparameters: 3\n", "x.yaml:3 hyperparameters: 3 is not a map"),
        (
            "entrypoint: m:T\nsearcher: {metric: m}\nhyperparameters:\n  ds_config:\n    optimizer: {type: Adam}\n",
            'x.yaml:5 hyperparameters.ds_config.optimizer: a nested key "type"',
        ),
    ],
)
def test_faults(text: str, message: str):
    with pytest.raises(ConfigError) as error:
        read_experiment(text, "x.yaml")
    assert str(error.value).startswith(message)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_experiment(tmp_path / "none.yaml")
    (tmp_path / "const.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"Did you mean .*/const\.yaml\?$"):
        read_experiment(tmp_path / "conts.yaml")


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "experiments").rglob("*.yaml")), ids=lambda path: path.parent.name
)
def test_every_experiment_of_the_project_is_read(path: Path):
    read = read_experiment(path)
    assert read.warnings == ()


def test_a_faulty_experiment_is_still_understood():
    """For a check that goes on: what is wrong stands at its default, and the faults are listed."""
    text = "entrypoint: model_def:T\nhyperparameters: {lr: 1}\nsearcher: {name: single, metric: loss}\nmax_restarts: -1\nnam: x\n"
    examined = examine_experiment(text)
    config, faults = examined.config, examined.faults
    assert (config.max_restarts, config.entrypoint, config.hyperparameters) == (5, "model_def:T", {"lr": 1})
    assert [fault.where for fault in faults] == ["experiment:5 nam", "experiment:4 max_restarts"]
    with pytest.raises(ConfigError, match="2 faults"):
        read_experiment(text)


def test_numbers_are_those_that_a_trial_of_a_cluster_gets():
    text = "entrypoint: m:T\nsearcher: {name: single, metric: loss}\nhyperparameters: {a: 1.0, b: 0.5, c: 1e30}\n"
    found = read_experiment(text).hyperparameters
    assert [(value, type(value)) for value in found.values()] == [(1, int), (0.5, float), (1e30, float)]


@pytest.mark.parametrize(
    ("old", "new"), [("{}", "{x: .inf}"), ("name: single,", "name: single, max_trials: 3,"), ("{}", "{}\nlabels: 3")]
)
def test_what_only_a_cluster_refuses(old: str, new: str):
    examined = examine_experiment(SMALL.replace(old, new))
    assert not examined.faults and len(examined.cluster_faults) == 1
