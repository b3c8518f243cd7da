"""Read an experiment's YAML, with settings of the command line over it, and find the ds_config of
its trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import ExperimentConfig, examine_experiment, read_experiment, read_words
from zero_trial.experiment.sections import Period

HEAD = "entrypoint: model_def:MyTrial\nsearcher: {name: single, metric: loss}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "const.yaml"
    path.write_text(HEAD + text)
    return path


def test_the_overlay_lies_over_the_file_and_every_leaf_knows_its_place(tmp_path: Path):
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 8,\n"zero_optimization": {"stage": 1, "overlap_comm": true}}'
    )
    text = (
        "data: {ds_config: ds.json}\nhyperparameters:\n  ds_config:\n    zero_optimization: {stage: 2}\n"
        "    optimizer: {type_: Adam, params: {lr: 0.1}}\n"
    )
    experiment = read_experiment(write(tmp_path, text))
    config = read_ds_config(experiment.ds_config(tmp_path / "model"))
    assert (config.train_batch_size, config.zero_optimization.stage, config.zero_optimization.overlap_comm) == (
        8,
        2,
        True,
    )
    assert config.optimizer is not None and config.optimizer.type == "Adam"
    assert config.sources["train_batch_size"] == "ds.json:1"
    assert config.sources["zero_optimization.stage"] == "const.yaml:6 hyperparameters.ds_config"
    assert config.sources["zero_optimization.overlap_comm"] == "ds.json:2"


def test_a_misspelled_section_is_named_where_it_stands(tmp_path: Path):
    experiment = read_experiment(write(tmp_path, "hyperparameters:\n  ds_config:\n    zero_optimisation: {stage: 2}\n"))
    with pytest.raises(ConfigError) as error:
        read_ds_config(experiment.ds_config(tmp_path))
    assert str(error.value) == (
        'const.yaml:5 hyperparameters.ds_config.zero_optimisation: unknown key. Did you mean "zero_optimization"? '
        "(DeepSpeed would ignore this and train without ZeRO.)"
    )


@pytest.mark.parametrize(("name", "meant"), [("No", "false"), ("y", "true")])
def test_a_hyperparameter_that_would_arrive_as_a_boolean_is_refused(tmp_path: Path, name: str, meant: str):
    """Here, and so by `zero-trial check` and `run`, as by a master of ours."""
    with pytest.raises(ConfigError, match=rf"const.yaml:4 hyperparameters\.{meant}: {name} is {meant} in YAML 1.1"):
        read_experiment(write(tmp_path, f"hyperparameters:\n  {name}: 3\n"))
    experiment = read_experiment(write(tmp_path, f"hyperparameters:\n  '{name}': {name}\n"))
    assert experiment.hyperparameters == {name: meant == "true"}


@pytest.mark.parametrize(
    "text",
    [
        "data: {ds_config: {train_batch_size: 8}}\nhyperparameters: {}\n",
        "data: {ds_config: ds.json}\nhyperparameters: {}\n",
        "hyperparameters: {deepspeed_config: ds.json}\n",
        "hyperparameters: {ds_config: ds.json}\n",
        "hyperparameters: {ds_config: {train_batch_size: 8}}\n",
        "hyperparameters: {ds_config: {type: const, val: {train_batch_size: 8}}}\n",
        "data: {ds_config: eyJ0cmFpbl9iYXRjaF9zaXplIjogOH0=}\nhyperparameters: {}\n",
    ],
)
def test_all_the_places_where_it_may_be(tmp_path: Path, text: str):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    experiment = read_experiment(write(tmp_path, text))
    assert experiment.names_ds_config()
    assert read_ds_config(experiment.ds_config(tmp_path)).train_batch_size == 8


def test_a_file_is_the_one_that_a_cluster_gets(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    experiment = read_experiment(write(tmp_path, "data: {ds_config: ds.json}\nhyperparameters: {}\n"))
    (tmp_path / "ds.json").write_text('{"train_batch_size": 2}')
    alone = read_ds_config(experiment.ds_config(model))
    assert alone.train_batch_size == 2
    assert any("--include" in warning for warning in alone.warnings)
    (model / "ds.json").write_text('{"train_batch_size": 2}')
    both = read_ds_config(experiment.ds_config(model))
    assert (both.train_batch_size, both.warnings) == (2, ())
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1}')
    with pytest.raises(ConfigError, match=r"two different files are called ds\.json") as error:
        experiment.ds_config(model)
    assert "const.yaml:3 data.ds_config" in str(error.value) and f"would use {model / 'ds.json'}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "hyperparameters: {}\n",
            "const.yaml data.ds_config: no ds_config is set. Write data: {ds_config: ds_config.json}.",
        ),
        ("data: {ds_config: ds_confg.json}\nhyperparameters: {}\n", 'Did you mean "ds_config.json"?'),
        ("data: {ds_config: [1]}\nhyperparameters: {}\n", "const.yaml:3 data.ds_config: not a ds_config: got [1]"),
    ],
)
def test_no_ds_config(tmp_path: Path, text: str, message: str):
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        experiment = read_experiment(write(tmp_path, text))
        assert experiment.names_ds_config() == ("data" in text)
        experiment.ds_config(tmp_path)
    assert message in str(error.value)


def test_sampled_hyperparameters_take_the_place_of_ranges(tmp_path: Path):
    text = "hyperparameters:\n  ds_config:\n    zero_optimization: {stage: {type: categorical, vals: [1, 9]}}\n"
    experiment = read_experiment(write(tmp_path, text))
    assert experiment.search_space == ("ds_config.zero_optimization.stage",)
    sampled = {"ds_config": {"zero_optimization": {"stage": 1}}}
    assert read_ds_config(experiment.ds_config(tmp_path, sampled)).zero_optimization.stage == 1
    bad = {"ds_config": {"zero_optimization": {"stage": 9}}}
    with pytest.raises(
        ConfigError, match=r"const.yaml:5 hyperparameters.ds_config.zero_optimization.stage: wrong value: got 9"
    ):
        read_ds_config(experiment.ds_config(tmp_path, bad))


def test_what_the_experiment_knows_for_auto():
    searcher = {"name": "single", "metric": "loss"}
    base = {"entrypoint": "m:T", "hyperparameters": {}}
    assert read_experiment({**base, "searcher": {**searcher, "max_length": {"batches": 7}}}).hints == {
        "total_num_steps": 7
    }
    assert read_experiment({**base, "searcher": {**searcher, "max_length": {"epochs": 7}}}).hints == {}


def test_plain_data_names_a_file_beside_the_yaml_in_full(tmp_path: Path):
    path = write(tmp_path, "hyperparameters: {}\ndata: {ds_config: ds.json, more: 1}\n")
    assert read_experiment(path).plain()["data"] == {"ds_config": "ds.json", "more": 1}
    (tmp_path / "ds.json").write_text("{}")
    assert read_experiment(path).plain()["data"] == {"ds_config": str(tmp_path / "ds.json"), "more": 1}


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
    assert read.data == {"source": "stdlib"}
    searcher = read.searcher
    assert (searcher.name, searcher.metric, searcher.max_length) == ("adaptive_asha", "val", None)
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
    assert (read.name, read.slots_per_trial, read.max_restarts, read.experiment_seed) == ("const", 1, 5, None)
    assert read.searcher.max_length == Period("batches", 5)
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
        "  const.yaml:4 searcher.metric: the metric is missing. Name a metric that evaluation returns, for example validation_loss.",
        '  const.yaml:4 searcher.name: wrong value: got "asha", expected one of "single", "random", "grid", "adaptive_asha", '
        '"adaptive", "adaptive_simple", "sync_halving", "async_halving", "pbt", "custom".',
        "  const.yaml:4 searcher.max_length: wrong value: got {steps: 4}, expected {batches: n}, {epochs: n}, {records: n} or a number of batches.",
        "  const.yaml:1 name: wrong value: got 3, expected a string.",
        "  const.yaml entrypoint: the entrypoint is missing: expected module:Class. Write entrypoint: model_def:MyTrial.",
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
        ("entrypoint: m:T\n", "x.yaml searcher: the searcher is missing. Write searcher: {name: single"),
        ("entrypoint: ''\nsearcher: {metric: m}\n", "x.yaml:1 entrypoint: the entrypoint is missing"),
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
