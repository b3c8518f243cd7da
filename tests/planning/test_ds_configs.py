"""The ds_configs of a search: what can be trained, what would be pruned, and one issue for the
same fault at many points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import InvalidHP
from zero_trial.experiment.experiment import read_experiment
from zero_trial.experiment.space import explore
from zero_trial.planning.check import ConfigChecks, check_ds_configs, first_legal, resolve
from zero_trial.planning.issues import Severity


def check(
    hyperparameters: dict[str, Any], ds_config: dict[str, Any], slots: int = 2, name: str = "grid"
) -> ConfigChecks:
    searcher = {"name": name, "metric": "loss"}
    experiment = read_experiment(
        {
            "entrypoint": "m:T",
            "searcher": searcher,
            "hyperparameters": hyperparameters,
            "data": {"ds_config": ds_config},
        }
    )
    return check_ds_configs(experiment, Path(), slots, explore(experiment.hyperparameters, name, 100))


def one_of(*values: Any) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


def test_points_that_contradict_are_pruned_and_said_once():
    hyperparameters = {"global_batch_size": one_of(8, 10, 12, 14), "lr": one_of(0.1, 0.2)}
    found = check(hyperparameters, {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}})
    assert [resolved.point.values["global_batch_size"] for resolved in found.legal] == [8, 8, 12, 12]
    assert found.pruned == (3, 4, 7, 8)
    (issue,) = found.issues
    assert issue.severity is Severity.WARNING and issue.points == (3, 4, 7, 8)
    assert issue.text.startswith("train_batch_size 10 ≠ micro 2 × accumulation 2 × ranks 2 = 8.")
    assert issue.text.endswith("(would be pruned: at 4 of 8 points, first global_batch_size=10, lr=0.1)")
    assert found.legal[0].batch.batch.accumulation == 2
    assert found.legal[1].config.optimizer is not None and found.legal[1].config.optimizer.params == {"lr": 0.2}


def test_a_search_of_which_nothing_is_left_is_a_fault():
    found = check({"global_batch_size": one_of(3, 5)}, {})
    assert found.legal == () and found.pruned == (1, 2)
    assert [issue.severity for issue in found.issues] == [Severity.FAULT]
    assert found.issues[0].text.endswith("(would be pruned: at every point)")


def test_a_value_that_cannot_be_is_a_fault_wherever_it_stands():
    found = check({"ds_config": {"zero_optimization": {"stage": one_of(1, 7)}}}, {"train_batch_size": 8})
    (issue,) = found.issues
    assert issue.severity is Severity.FAULT and issue.points == (2,) and found.pruned == ()
    assert "zero_optimization.stage: wrong value: got 7" in issue.text
    assert "(at 1 of 2 points, first ds_config.zero_optimization.stage=7)" in issue.text


def test_warnings_are_collected_too():
    found = check({"x": one_of(1, 2)}, {"train_batch_size": 8, "bfloat16": {"enabled": True}})
    assert [(issue.severity, issue.text) for issue in found.issues] == [
        (Severity.WARNING, "data.ds_config.bfloat16: read as bf16. (at every point)")
    ]


def test_one_point_is_not_numbered():
    found = check({}, {"train_batch_size": 3}, name="single")
    assert found.issues[0].text.startswith("train_batch_size 3 ≠") and found.issues[0].at == ""
    assert found.issues[0].severity is Severity.FAULT


def test_resolve_raises():
    experiment = read_experiment(
        {
            "entrypoint": "m:T",
            "searcher": {"name": "grid", "metric": "loss"},
            "hyperparameters": {"global_batch_size": one_of(3, 4)},
            "data": {"ds_config": {}},
        }
    )
    first, second = explore(experiment.hyperparameters, "grid", 9).points
    with pytest.raises(InvalidHP):
        resolve(experiment, Path(), 2, first)
    assert resolve(experiment, Path(), 2, second).batch.batch.micro_batch_size == 2
    assert first_legal(experiment, Path(), 2).point.number == 2
    with pytest.raises(InvalidHP, match="train_batch_size 3 ≠"):
        first_legal(experiment, Path(), 8)
