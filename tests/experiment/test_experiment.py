"""An experiment and the ds_config of its trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.ds_config.reader import read_ds_config
from zero_trial.errors import ConfigError
from zero_trial.experiment.experiment import read_experiment

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


@pytest.mark.parametrize(("name", "meant"), [("n", "false"), ("No", "false"), ("y", "true"), ("on", "true")])
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
    assert read_ds_config(read_experiment(write(tmp_path, text)).ds_config(tmp_path)).train_batch_size == 8


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
    assert "const.yaml:3 data.ds_config" in str(error.value) and f"would take {model / 'ds.json'}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "hyperparameters: {}\n",
            "const.yaml data.ds_config: there is no ds_config. Write data: {ds_config: ds_config.json}.",
        ),
        ("data: {ds_config: ds_confg.json}\nhyperparameters: {}\n", 'Did you mean "ds_config.json"?'),
        ("data: {ds_config: [1]}\nhyperparameters: {}\n", "const.yaml:3 data.ds_config: not a ds_config: got [1]"),
    ],
)
def test_no_ds_config(tmp_path: Path, text: str, message: str):
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        read_experiment(write(tmp_path, text)).ds_config(tmp_path)
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


def test_whether_a_ds_config_is_named():
    base = {"entrypoint": "m:T", "searcher": {"name": "single", "metric": "loss"}}
    named = [{"hyperparameters": {"ds_config": {}}}, {"hyperparameters": {"deepspeed_config": "a.json"}}]
    named += [{"hyperparameters": {}, "data": {"ds_config": "a.json"}}]
    assert all(read_experiment({**base, **more}).names_ds_config() for more in named)
    assert not read_experiment({**base, "hyperparameters": {"x": 1}, "data": {}}).names_ds_config()


def test_plain_data_names_a_file_beside_the_yaml_in_full(tmp_path: Path):
    path = write(tmp_path, "hyperparameters: {}\ndata: {ds_config: ds.json, more: 1}\n")
    assert read_experiment(path).plain()["data"] == {"ds_config": "ds.json", "more": 1}
    (tmp_path / "ds.json").write_text("{}")
    assert read_experiment(path).plain()["data"] == {"ds_config": str(tmp_path / "ds.json"), "more": 1}
