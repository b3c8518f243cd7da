"""What ``det experiment create`` would refuse is found by the check, once, with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planning.project import EXPERIMENT, messages, project
from zero_trial.experiment.experiment import examine_experiment
from zero_trial.experiment.rules import ClusterDefaults, InvalidExperiment, complete


def said(text: str) -> list[str]:
    examined = examine_experiment(text, "const.yaml")
    assert examined.faults == ()
    return [*map(str, examined.cluster_faults), *examined.cluster_warnings]


def test_a_good_experiment():
    assert said(EXPERIMENT) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("labels: three\n", "const.yaml:13 labels: "),
        ("log_policies: [{pattern: 3}]\n", "const.yaml:13 log_policies[0].pattern: "),
        ("workspace: a\n", "const.yaml: workspace and project must either both be set"),
        ("environment: {image: {cpu: 3}}\n", "const.yaml:13 environment.image.cpu: "),
        (
            "preemption_timeout: 0\n",
            "const.yaml:13 preemption_timeout: 0 is less than 1.",
        ),
    ],
)
def test_what_only_a_master_looks_into(more: str, message: str):
    text = EXPERIMENT + more
    (line,) = said(text)
    assert line.startswith(message)
    with pytest.raises(InvalidExperiment):
        complete(text, ClusterDefaults(checkpoint_storage={"type": "shared_fs", "host_path": "/"}))


@pytest.mark.parametrize("name", ["n", "Yes", "ON", "False"])
def test_a_hyperparameter_that_would_arrive_under_another_name_stops_a_run(name: str):
    text = EXPERIMENT.replace("hyperparameters:\n", f"hyperparameters:\n  {name}: 3\n")
    (fault,) = examine_experiment(text, "const.yaml").faults
    assert fault.where is not None and fault.where.endswith(("hyperparameters.true", "hyperparameters.false"))
    assert f"'{name}'" in str(fault)
    assert examine_experiment(text.replace(f"{name}: 3", f"'{name}': 3"), "const.yaml").faults == ()


def test_data_that_arrives_under_another_name_is_warned_of():
    assert len(said(EXPERIMENT.replace("data:\n", "data:\n  on: 3\n"))) == 1


def test_slots_above_their_limit():
    (line,) = said(EXPERIMENT.replace("slots_per_trial: 2", "slots_per_trial: 2\n  max_slots: 1"))
    assert line == "const.yaml:3 resources: slots_per_trial must be <= max_slots."


def test_what_a_master_warns_of():
    assert said(EXPERIMENT + "records_per_epoch: 7\n") == [
        "records_per_epoch is read by no trial of today, and has no effect"
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
