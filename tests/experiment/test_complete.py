"""Whole experiments, from YAML to the completed configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.experiment.written import CLUSTER, completed
from zero_trial.experiment.rules import ClusterDefaults, InvalidExperiment, complete

ROOT = Path(__file__).parents[3]
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))
GOOD = "name: a\nentrypoint: x\nsearcher: {name: single, metric: loss}\n"


def messages(text: str) -> list[str]:
    with pytest.raises(InvalidExperiment) as error:
        complete(text, CLUSTER)
    return error.value.messages


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.parent.name)
def test_the_experiments_of_this_project(path: Path):
    done = complete(path.read_text(encoding="utf-8"), CLUSTER)
    assert done.warnings == []
    json.dumps(done.config, allow_nan=False)


def test_completing_twice_changes_nothing():
    once = complete(GOOD, CLUSTER).config
    again = complete(json.dumps(once), CLUSTER)
    assert again.config == once and again.warnings == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "experiment: not a YAML mapping: expected keys with values."),
        ("- a", "experiment: not a YAML mapping: expected keys with values."),
        ("a: [", "experiment:1: not readable as YAML"),
        ("a: b: c", "experiment:1: not readable as YAML"),
        (f"{GOOD}name: b\n", "experiment:4 name: duplicate key"),
        (f"{GOOD}data: {{x: .nan}}\n", "<config>.data.x: nan is not a number that JSON knows"),
        (f"{GOOD}data: {{x: [.inf]}}\n", "<config>.data.x[0]: inf is not a number that JSON knows"),
        (f"{GOOD}data: {{x: !!binary aGk=}}\n", "<config>.data.x: a YAML value of type bytes has no JSON form"),
        (f"{GOOD}data: {{x: !!python/name:os.system ''}}\n", "experiment:4: not readable as YAML"),
    ],
)
def test_what_is_no_yaml_or_no_json(text: str, fault: str):
    assert messages(text)[0].startswith(fault)


def test_old_forms_are_warned_about_once():
    done = completed(
        "log_policies: [{pattern: a, action: {type: exclude_node}}, {pattern: b, action: {type: exclude_node}}]"
    )
    assert done.warnings == ["log_policies: action is written as a word today, such as action: cancel_retries"]


def test_a_template_lies_between():
    template = {"resources": {"priority": 7, "slots_per_trial": 3}, "max_restarts": 1, "name": "template"}
    config = completed("resources: {slots_per_trial: 2}", template=template).config
    assert (config["name"], config["max_restarts"]) == ("e", 1)
    assert (config["resources"]["priority"], config["resources"]["slots_per_trial"]) == (7, 2)


def test_a_template_may_be_for_commands_too():
    """The key is shown, as by Determined's master, and means nothing for trials."""
    assert completed("{}", template={"resources": {"slots": 0}}).config["resources"]["slots"] == 0
    assert "slots" not in completed("{}").config["resources"]
    with pytest.raises(InvalidExperiment, match=r"resources\.slots: is for commands"):
        completed("resources: {slots: 0}", template={"resources": {"slots": 0}})
    with pytest.raises(InvalidExperiment, match=r"resources\.slots"):
        completed("{}", template={"resources": {"slots": "two"}})


def test_a_faulty_template_is_a_fault():
    with pytest.raises(InvalidExperiment, match=r"<config>.max_restarts: -1 is less than 0"):
        completed("{}", template={"max_restarts": -1})


def test_the_error_says_all():
    with pytest.raises(InvalidExperiment) as error:
        completed("{max_restarts: -1, debug: 3}")
    assert str(error.value).splitlines() == [
        "invalid experiment configuration:",
        "  <config>.max_restarts: -1 is less than 0",
        "  <config>.debug: 3 is neither true nor false",
    ]
    assert error.value.exit_code == 2


def test_text_that_has_no_utf_8_is_a_fault():
    found = messages(GOOD + 'data: {"a\\udc00": ["\\ud800"], b: "\\U0001f600"}\n')
    assert found == [
        "<config>.data: half a character (a lone surrogate) in a text",
        "<config>.data.a?[0]: half a character (a lone surrogate) in a text",
    ]


def test_the_clusters_word_counts_where_the_experiment_says_nothing():
    cluster = ClusterDefaults(
        checkpoint_storage={"type": "shared_fs", "host_path": "/s"},
        task_container_defaults={
            "image": "cluster/image:1",
            "environment_variables": ["A=cluster"],
            "bind_mounts": [{"host_path": "/d", "container_path": "/d"}],
            "shm_size_bytes": 1024,
            "slurm": {"sbatch_args": ["-c"]},
            "preemption_timeout": 30,
        },
        name="Experiment (happy-heron)",
        experiment_seed=5,
    )
    config = completed(
        "{name: null, environment: {image: {cuda: mine}, environment_variables: [A=mine]}, slurm: {sbatch_args: [-u]}}",
        cluster,
    ).config
    assert config["name"] == "Experiment (happy-heron)"
    assert config["reproducibility"] == {"experiment_seed": 5}
    assert config["environment"]["image"] == {"cpu": "cluster/image:1", "cuda": "mine", "rocm": "cluster/image:1"}
    assert config["environment"]["environment_variables"]["cpu"] == ["A=cluster", "A=mine"]
    assert config["bind_mounts"][0]["container_path"] == "/d"
    assert (config["resources"]["shm_size"], config["preemption_timeout"]) == (1024, 30)
    assert config["slurm"]["sbatch_args"] == ["-c", "-u"]
