"""From a config to a search, and back from its snapshot."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.search.driving import LR
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master.search import build, restore
from zero_trial.master.search.build import training_length

ASHA = {"name": "adaptive_asha", "metric": "m", "max_trials": 4, "max_time": 9, "time_metric": "epochs"}


@pytest.mark.parametrize("name", ["single", "random", "grid", "adaptive_asha"])
def test_every_kind(name: str):
    space = {"lr": {**LR["lr"], "count": 3}}
    search = build({**ASHA, "name": name}, space, seed=5)
    assert search.kind == name
    again = restore({**ASHA, "name": name}, space, search.snapshot())
    assert again.snapshot() == search.snapshot() and again.start() == search.start()


def test_nulls_are_defaults():
    nulls: dict[str, Any] = dict.fromkeys(
        ("mode", "divisor", "max_rungs", "max_concurrent_trials", "bracket_rungs", "smaller_is_better", "max_length")
    )
    assert build({**ASHA, **nulls}, LR, seed=5).snapshot() == build(ASHA, LR, seed=5).snapshot()


def test_the_seed_decides():
    first, same, other = (build({**ASHA, "name": "random"}, LR, seed=seed).start() for seed in (5, 5, 6))
    assert first == same != other


def test_no_such_searcher():
    with pytest.raises(ConfigError, match=r"searcher.name: no such searcher: got pbt"):
        build({"name": "pbt"}, LR, seed=5)


def test_the_snapshot_of_another():
    snapshot = build({**ASHA, "name": "random"}, LR, seed=5).snapshot()
    with pytest.raises(ZeroTrialError, match="the snapshot of another searcher: got random, expected adaptive_asha"):
        restore(ASHA, LR, snapshot)


def test_training_length():
    assert training_length({"max_length": {"epochs": 3}}) == ("epochs", 3)
    assert training_length({"max_time": 7, "time_metric": "batches", "max_length": None}) == ("batches", 7)
    with pytest.raises(ConfigError, match="there is no training length"):
        training_length({"max_length": 5})
