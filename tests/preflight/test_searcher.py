"""What is said about a searcher."""

from __future__ import annotations

from typing import Any

import pytest

from zero_trial.experiment.experiment import read_experiment
from zero_trial.preflight.experiment_rules import check_searcher

RANGE = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


def said(searcher: dict[str, Any], hyperparameters: dict[str, Any]) -> list[str]:
    base = {"entrypoint": "m:T", "hyperparameters": hyperparameters}
    whole = {"metric": "loss", "max_length": {"batches": 3}, **searcher}
    found = check_searcher(read_experiment({**base, "searcher": whole}))
    return [f"{finding.severity.value}: {finding.text}" for finding in found]


def test_nothing_to_say():
    assert said({"name": "single"}, {"lr": 1}) == []
    assert said({"name": "random", "max_trials": 3}, RANGE) == []
    assert said({"name": "adaptive_asha", "max_trials": 3, "max_length": None, "max_time": 9}, RANGE) == []


@pytest.mark.parametrize(
    ("searcher", "hyperparameters", "message"),
    [
        (
            {"name": "grid"},
            RANGE,
            "error: hyperparameters.lr.count: a grid needs to know how many values to take. Add count: 5.",
        ),
        (
            {"name": "random"},
            RANGE,
            "error: searcher.max_trials: the searcher random needs it. Write searcher: {max_trials: 16, ...}.",
        ),
        (
            {"name": "async_halving", "max_trials": 3},
            RANGE,
            "error: searcher.name: the searcher async_halving exists no more. Use adaptive_asha, or random.",
        ),
        (
            {"name": "custom"},
            RANGE,
            "error: searcher.name: the searcher custom exists no more. Use one of single, random, grid, adaptive_asha.",
        ),
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
