"""What is said about a searcher."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.experiment.experiment import examine_experiment
from zero_trial.planning.check import check_searcher

RANGE = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


def said(searcher: dict[str, Any], hyperparameters: dict[str, Any]) -> list[str]:
    base = {"entrypoint": "m:T", "hyperparameters": hyperparameters}
    whole = {"metric": "loss", "max_length": {"batches": 3}, **searcher}
    found = check_searcher(examine_experiment({**base, "searcher": whole}).config)
    return [f"{issue.severity.value}: {issue.text}" for issue in found]


def test_nothing_to_say():
    assert said({"name": "single"}, {"lr": 1}) == []
    assert said({"name": "random", "max_trials": 3}, RANGE) == []
    assert said({"name": "adaptive_asha", "max_trials": 3, "max_length": None, "max_time": 9}, RANGE) == []


@pytest.mark.parametrize(
    ("searcher", "hyperparameters", "message"),
    [
        (
            {"name": "single", "max_length": None},
            {},
            "error: searcher.max_length: the run has no length. Write searcher: {max_length: {batches: 200}}.",
        ),
        (
            {"name": "grid"},
            {"lr": 1},
            "warn: searcher.name: there is nothing to search: all hyperparameters are constants, and grid tries them again and again. "
            "Use searcher: {name: single}.",
        ),
        (
            {"name": "single"},
            RANGE,
            "warn: searcher.name: single draws one point, and zero-trial run takes constants only: lr. "
            "Use constants, or another searcher.",
        ),
    ],
)
def test_what_is_missing(searcher: dict[str, Any], hyperparameters: dict[str, Any], message: str):
    assert said(searcher, hyperparameters) == [message]


@pytest.mark.parametrize(
    ("searcher", "message"),
    [
        ({"name": "grid"}, "hyperparameters.lr: grid search is in use but count was not provided."),
        ({"name": "random"}, "searcher.max_trials: is a required property."),
        ({"name": "async_halving", "max_trials": 3}, "searcher.name: async_halving was removed."),
        ({"name": "custom"}, "searcher.name: custom searchers were removed."),
        ({"name": "singel"}, 'searcher.name: wrong value: got "singel", expected one of "single"'),
    ],
)
def test_what_the_rules_of_an_experiment_say(searcher: dict[str, Any], message: str):
    """Said once, by the rules that the master has too."""
    whole = {"metric": "loss", "max_length": {"batches": 3}, **searcher}
    examined = examine_experiment({"entrypoint": "m:T", "hyperparameters": RANGE, "searcher": whole})
    (fault,) = [*examined.faults, *examined.cluster_faults]
    assert str(fault).startswith(message)
