"""What ``det experiment create`` would refuse is found by the check, once, with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.project import EXPERIMENT, messages, project
from zero_trial.experiment.defaults import ClusterDefaults
from zero_trial.experiment.experiment import read_experiment
from zero_trial.experiment.rules import InvalidExperiment, complete
from zero_trial.preflight.experiment_rules import check_cluster_rules, keys_of


def said(text: str) -> list[str]:
    experiment = read_experiment(text, "const.yaml")
    return [f"{finding.severity.value}: {finding.text}" for finding in check_cluster_rules(experiment, text, ())]


def test_a_good_experiment():
    assert said(EXPERIMENT) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("labels: three\n", "error: const.yaml:13 labels: a master refuses this: "),
        ("log_policies: [{pattern: 3}]\n", "error: const.yaml:13 log_policies[0].pattern: a master refuses this: "),
        ("workspace: a\n", "error: const.yaml: a master refuses this: workspace and project must either both be set"),
        ("environment: {image: {cpu: 3}}\n", "error: const.yaml:13 environment.image.cpu: a master refuses this: "),
        (
            "preemption_timeout: 0\n",
            "error: const.yaml:13 preemption_timeout: a master refuses this: 0 is less than 1.",
        ),
    ],
)
def test_what_only_a_master_looks_into(more: str, message: str):
    text = EXPERIMENT + more
    (line,) = said(text)
    assert line.startswith(message)
    with pytest.raises(InvalidExperiment):
        complete(text, ClusterDefaults(checkpoint_storage={"type": "shared_fs", "host_path": "/"}))


def test_slots_above_their_limit():
    (line,) = said(EXPERIMENT.replace("slots_per_trial: 2", "slots_per_trial: 2\n  max_slots: 1"))
    assert line == "error: const.yaml:3 resources: a master refuses this: slots_per_trial must be <= max_slots."


def test_what_a_master_warns_of():
    assert said(EXPERIMENT + "records_per_epoch: 7\n") == [
        "warn: records_per_epoch is read by no trial of today, and has no effect."
    ]


def test_what_the_reader_has_found_is_not_said_again(tmp_path: Path):
    text = EXPERIMENT.replace("{batches: 4}", "{batchs: 4}").replace("searcher:", "max_restart: 2\nsearcher:")
    found = messages(project(tmp_path, text + "hyperparameter: {}\nlabels: 3\n").check(build=False))
    assert len(found) == len({line.partition(": ")[2].partition(": ")[0] for line in found}) + 1, (
        "max_length: wrong, and so none"
    )
    assert [line for line in found if "a master refuses" in line] == [
        "error: const.yaml:15 labels: a master refuses this: 3 is not a list."
    ]


def test_keys():
    assert keys_of("searcher.bracket_rungs[0].x") == ("searcher", "bracket_rungs", "[0]", "x") and keys_of("") == ()
