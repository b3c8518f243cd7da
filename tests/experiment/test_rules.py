"""Whole experiments, from YAML to the completed configuration: what is no YAML, templates and the
cluster's defaults laid under them, and older forms rewritten."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.experiment.test_sections import CLUSTER, completed
from zero_trial.experiment.rules import ClusterDefaults, InvalidExperiment, complete, merge, modern

GOOD = "name: a\nentrypoint: x\nsearcher: {name: single, metric: loss}\n"


def messages(text: str) -> list[str]:
    with pytest.raises(InvalidExperiment) as error:
        complete(text, CLUSTER)
    return error.value.messages


def test_completing_twice_changes_nothing():
    once = complete(GOOD, CLUSTER).config
    again = complete(json.dumps(once), CLUSTER)
    assert again.config == once and again.warnings == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "experiment: not a YAML mapping: expected keys with values."),
        ("a: [", "experiment:1: not readable as YAML"),
        (f"{GOOD}name: b\n", "experiment:4 name: duplicate key"),
        (f"{GOOD}data: {{x: [.inf]}}\n", "<config>.data.x[0]: inf is not a valid JSON number"),
        (f"{GOOD}data: {{x: !!binary aGk=}}\n", "<config>.data.x: a YAML value of type bytes has no JSON equivalent"),
        (f"{GOOD}data: {{x: !!python/name:os.system ''}}\n", "experiment:4: not readable as YAML"),
    ],
)
def test_what_is_no_yaml_or_no_json(text: str, fault: str):
    assert messages(text)[0].startswith(fault)


def test_a_template_lies_between():
    template = {"resources": {"priority": 7, "slots_per_trial": 3}, "max_restarts": 1, "name": "template"}
    config = completed("resources: {slots_per_trial: 2}", template=template).config
    assert (config["name"], config["max_restarts"]) == ("e", 1)
    assert (config["resources"]["priority"], config["resources"]["slots_per_trial"]) == (7, 2)


def test_a_template_may_be_for_commands_too():
    """The key is shown, as by Determined's master, and means nothing for trials."""
    assert completed("{}", template={"resources": {"slots": 0}}).config["resources"]["slots"] == 0
    assert "slots" not in completed("{}").config["resources"]
    with pytest.raises(InvalidExperiment, match=r"resources\.slots: is only for commands"):
        completed("resources: {slots: 0}", template={"resources": {"slots": 0}})
    with pytest.raises(InvalidExperiment, match=r"resources\.slots"):
        completed("{}", template={"resources": {"slots": "two"}})


def test_all_faults_are_told():
    with pytest.raises(InvalidExperiment) as error:
        completed("debug: 3", template={"max_restarts": -1})
    assert str(error.value).splitlines() == [
        "invalid experiment configuration:",
        "  <config>.max_restarts: -1 is less than 0",
        "  <config>.debug: 3 is neither true nor false",
    ]
    assert error.value.exit_code == 2


def test_text_that_has_no_utf_8_is_a_fault():
    found = messages(GOOD + 'data: {"a\\udc00": ["\\ud800"], b: "\\U0001f600"}\n')
    assert found == [
        "<config>.data: invalid Unicode (unpaired surrogate)",
        "<config>.data.a?[0]: invalid Unicode (unpaired surrogate)",
    ]


def test_the_clusters_word_counts_where_the_experiment_says_nothing():
    storage = {"type": "shared_fs", "host_path": "/s"}
    cluster = ClusterDefaults(checkpoint_storage=storage, name="Experiment (happy-heron)", experiment_seed=5)
    config = completed("{name: null, environment: {image: {cuda: mine}}}", cluster).config
    assert config["name"] == "Experiment (happy-heron)"
    assert config["reproducibility"] == {"experiment_seed": 5}
    assert config["checkpoint_storage"]["host_path"] == "/s"


A, B = {"host_path": "/a", "container_path": "/x"}, {"host_path": "/b", "container_path": "/x"}
C = {"host_path": "/c", "container_path": "/y"}


@pytest.mark.parametrize(
    ("above", "below", "merged"),
    [
        ({"name": "a"}, {"name": "b", "debug": True}, {"name": "a", "debug": True}),
        ({"name": None}, {"name": "b"}, {"name": "b"}),
        ({"name": "a"}, {"name": None}, {"name": "a"}),
        ({"resources": {"priority": 1}}, {"resources": {"weight": 2}}, {"resources": {"priority": 1, "weight": 2}}),
        ({"bind_mounts": [A]}, {"bind_mounts": [B, C]}, {"bind_mounts": [A, C]}),
        ({"labels": ["a"]}, {"labels": ["a", "b"]}, {"labels": ["a", "b"]}),
        (
            {"environment": {"environment_variables": {"cpu": ["A=1"]}}},
            {"environment": {"environment_variables": {"cpu": ["A=0"], "cuda": ["B"]}}},
            {"environment": {"environment_variables": {"cpu": ["A=0", "A=1"], "cuda": ["B"]}}},
        ),
        ({"environment": {"add_capabilities": ["A"]}}, {"environment": {"add_capabilities": ["B"]}}, {"environment": {"add_capabilities": ["A"]}}),
        ({"slurm": {"sbatch_args": ["a"]}}, {"slurm": {"sbatch_args": ["b"]}}, {"slurm": {"sbatch_args": ["b", "a"]}}),
        (
            {"log_policies": [{"name": "a", "action": "x"}, {"pattern": "p"}]},
            {"log_policies": [{"name": "a", "action": "y"}, {"pattern": "q"}]},
            {"log_policies": [{"name": "a", "action": "x"}, {"pattern": "p"}, {"pattern": "q"}]},
        ),
        ({"data": {"a": {"b": 1}}}, {"data": {"a": {"c": 2}, "d": 3}}, {"data": {"a": {"b": 1}, "d": 3}}),
        # Kinds of storage and of searcher are not mixed, except for what all kinds share.
        (
            {"checkpoint_storage": {"type": "gcs", "bucket": "b", "save_trial_best": 3}},
            {"checkpoint_storage": {"type": "s3", "prefix": "p", "save_trial_best": 9, "save_trial_latest": 9}},
            {"checkpoint_storage": {"type": "gcs", "bucket": "b", "save_trial_best": 3, "save_trial_latest": 9}},
        ),
        (
            {"checkpoint_storage": {"save_trial_best": 3}},
            {"checkpoint_storage": {"type": "gcs", "bucket": "b"}},
            {"checkpoint_storage": {"type": "gcs", "bucket": "b", "save_trial_best": 3}},
        ),
        (
            {"searcher": {"name": "single", "metric": "loss"}},
            {"searcher": {"name": "random", "max_trials": 5, "source_checkpoint_uuid": "u"}},
            {"searcher": {"name": "single", "metric": "loss", "source_checkpoint_uuid": "u"}},
        ),
        # Hyperparameters: namespaces are united, ranges and values are not; a null is a value.
        ({"hyperparameters": {"a": {"b": 1}}}, {"hyperparameters": {"a": {"c": 2}, "d": 3}}, {"hyperparameters": {"a": {"b": 1, "c": 2}, "d": 3}}),
        (
            {"hyperparameters": {"a": {"type": "int", "minval": 1, "maxval": 2}}},
            {"hyperparameters": {"a": {"type": "int", "minval": 3, "maxval": 4, "count": 5}}},
            {"hyperparameters": {"a": {"type": "int", "minval": 1, "maxval": 2}}},
        ),
        ({"hyperparameters": {"a": {"b": 1}}}, {"hyperparameters": {"a": {"type": "const", "val": 1}}}, {"hyperparameters": {"a": {"b": 1}}}),
        ({"hyperparameters": {"a": None}}, {"hyperparameters": {"a": {"b": 1}}}, {"hyperparameters": {"a": None}}),
    ],
)  # fmt: skip
def test_merging(above: dict[str, Any], below: dict[str, Any], merged: dict[str, Any]):
    assert merge(above, below) == merged


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ({"environment": {"image": "x"}}, {"environment": {"image": {"cpu": "x", "cuda": "x", "rocm": "x"}}}, ""),
        (
            {"environment": {"image": {"cpu": "x", "gpu": "y"}}},
            {"environment": {"image": {"cuda": "y", "cpu": "x"}}},
            "environment.image.gpu is the older name of environment.image.cuda",
        ),
        (
            {"environment": {"environment_variables": {"gpu": ["A"], "cuda": ["B"]}}},
            {"environment": {"environment_variables": {"cuda": ["B"]}}},
            "environment.environment_variables.gpu is the older name of environment.environment_variables.cuda",
        ),
        (
            {"resources": {"devices": ["/a:/b", "/a:/b:r", "/a"]}},
            {
                "resources": {
                    "devices": [
                        {"host_path": "/a", "container_path": "/b"},
                        {"host_path": "/a", "container_path": "/b", "mode": "r"},
                        "/a",
                    ]
                }
            },
            "",
        ),
        ({"resources": {"agent_label": "x"}}, {"resources": {}}, "resources.agent_label has been removed from Determined, and has no effect"),
        (
            {"log_policies": [{"pattern": "a", "action": {"type": "exclude_node"}}]},
            {"log_policies": [{"pattern": "a", "action": "exclude_node"}]},
            "log_policies: write action as a string, such as action: cancel_retries",
        ),
        ({"records_per_epoch": 5}, {"records_per_epoch": 5}, "records_per_epoch is not used by current trials, and has no effect"),
        (
            {"searcher": {"name": "adaptive_asha", "max_length": {"batches": 5}}},
            {"searcher": {"name": "adaptive_asha", "max_length": {"batches": 5}}},
            "searcher.max_length has no effect in adaptive_asha: max_time and time_metric apply",
        ),
        (
            {"searcher": {"name": "adaptive_asha", "stop_once": False}},
            {"searcher": {"name": "adaptive_asha", "stop_once": False}},
            "searcher.stop_once has no effect: adaptive_asha always stops a trial permanently",
        ),
        (
            {"hyperparameters": {"ds_config": {"lr": {"type": "log", "base": 10, "minval": 1e-4, "maxval": 0.1}}}},
            {"hyperparameters": {"ds_config": {"lr": {"type": "log", "base": 10, "minval": 1e-4, "maxval": 0.1}}}},
            "hyperparameters.ds_config.lr: minval and maxval of a log range are exponents, so the values are 1 to 1.259. "
            "For 0.0001 to 0.1, write minval: -4, maxval: -1",
        ),
        ({"hyperparameters": {"lr": {"type": "log", "base": 10, "minval": -4.0, "maxval": -1.0}}},) * 2 + ("",),
    ],
)  # fmt: skip
def test_old_forms(old: dict[str, Any], new: dict[str, Any], warning: str):
    assert modern(old) == (new, [warning] if warning else [])


@pytest.mark.parametrize(
    "odd",
    [
        {"environment": 3},
        {"environment": {"image": 3, "environment_variables": "A"}},
        {"resources": {"shm_size": "lots", "devices": "x"}},
        {"resources": {"shm_size": "1g"}, "data_layer": 3},
        {"log_policies": [3, {"action": {"type": "x", "url": "u"}}]},
        {"searcher": []},
    ],
)
def test_what_is_not_understood_stays(odd: dict[str, Any]):
    assert modern(odd) == (odd, [])
