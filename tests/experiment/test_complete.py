"""Whole experiments, from YAML to the completed configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.experiment.written import CLUSTER, completed
from zero_trial.experiment.rules import InvalidExperiment, complete

ROOT = Path(__file__).parents[3]
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))
GOOD = "name: a\nentrypoint: x\nsearcher: {name: single, metric: loss}\n"


def messages(text: str) -> list[str]:
    with pytest.raises(InvalidExperiment) as error:
        complete(text, CLUSTER)
    return error.value.messages


def test_an_example():
    done = complete(
        """
        name: a search
        entrypoint: python3 -m determined.launch.torch_distributed python3 -m zero_trial.run model_def:MyTrial
        resources: {slots_per_trial: 2}
        searcher: {name: random, metric: loss, max_trials: 4}
        data: {ds_config: ds_config.json}
        hyperparameters:
          global_batch_size: 64
          ds_config: {optimizer: {params: {lr: {type: log, base: 10, minval: -5, maxval: -3}}}}
        """,
        CLUSTER,
    )
    assert done.warnings == []
    assert done.config["hyperparameters"]["ds_config"]["optimizer"]["params"]["lr"]["type"] == "log"
    assert done.config["checkpoint_storage"]["host_path"] == "/storage"
    assert done.config["reproducibility"]["experiment_seed"] == 11


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


def test_a_bomb_is_refused():
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for above, below in zip("abcdefg", "bcdefgh", strict=True):
        text += f"{below}: &{below} [{', '.join(['*' + above] * 10)}]\n"
    assert "too deeply nested or too large" in messages(text)[0]


def test_yaml_1_1_and_1_2():
    done = complete(f"{GOOD}hyperparameters: {{lr: 1e-4, day: 2024-01-02, flag: yes}}\n", CLUSTER)
    values = {name: given["val"] for name, given in done.config["hyperparameters"].items()}
    assert values == {"lr": 0.0001, "day": "2024-01-02", "flag": True}
    assert done.warnings == ["experiment:4 hyperparameters.lr: '1e-4' is a string in YAML 1.1. Write 1.0e-4."]


def test_anchors_and_merges():
    text = f"{GOOD}data: {{a: &x {{b: 1}}, c: {{<<: *x, d: 2}}}}\n"
    assert complete(text, CLUSTER).config["data"]["c"] == {"b": 1, "d": 2}


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
