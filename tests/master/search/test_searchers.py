"""The searchers single, random and grid, and how an experiment asks for one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.search.driving import LR, Play
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master.search import ExitReason, build, restore
from zero_trial.master.search.searcher import training_length


def play(space: dict[str, Any] = LR, **changes: Any) -> Play:
    return Play(build({"name": "random", "metric": "loss", "max_trials": 3, **changes}, space, seed=1))


def test_two_at_a_time():
    it = play(max_concurrent_trials=2)
    assert it.start() == "+1 +2"
    assert it.val(1, 10, 0.5) == ""  # validations decide nothing
    assert [it.exit(2), it.exit(1), it.exit(3)] == ["+3", "", "."]
    assert len({values["lr"] for values in it.hparams}) == 3 and len(set(it.seeds)) == 3


@pytest.mark.parametrize("most", [0, 16])
def test_all_at_once(most: int):
    assert play(max_concurrent_trials=most).start() == "+1 +2 +3"


def test_sixteen_at_a_time_by_default():
    assert play(max_trials=99).start().count("+") == 16


def test_errors_count():
    it = play(max_concurrent_trials=1, max_trials=2)
    it.start()
    assert [it.exit(1, ExitReason.ERRORED), it.exit(2, ExitReason.ERRORED)] == ["+2", "."]


def test_a_canceled_search_has_not_failed():
    it = play(max_concurrent_trials=1, max_trials=1)
    it.start()
    assert it.exit(1, ExitReason.CANCELED) == "."


def test_single():
    it = Play(build({"name": "single", "metric": "loss"}, {"lr": 0.1}, seed=1))
    assert (it.start(), it.exit(1)) == ("+1", ".")
    assert it.hparams == [{"lr": 0.1}]


def test_progress():
    it = play(max_concurrent_trials=2)
    it.start()
    # of the trials that are there, not of all three
    assert it.search.progress({it.ids[0]: 0.5, it.ids[1]: 0.25}) == pytest.approx(0.75 / 2)
    it.exit(1, ExitReason.ERRORED)
    # what is over counts as whole
    assert it.search.progress({it.ids[1]: 0.25}) == pytest.approx((1 + 0.25) / 3)
    it.exit(2)
    it.exit(3)
    assert it.search.progress({}) == 1.0


STAGES = {"stage": {"type": "categorical", "vals": [0, 1, 2, 3]}, "model": {}}


def play_grid(space: dict[str, Any] = STAGES, most: int = 2) -> Play:
    return Play(build({"name": "grid", "metric": "loss", "max_concurrent_trials": most}, space, seed=1))


def test_every_point_once_from_the_end():
    it = play_grid()
    assert it.start() == "+1 +2"
    assert [it.exit(1), it.exit(2), it.exit(4), it.exit(3)] == ["+3", "+4", "", "."]
    assert [values["stage"] for values in it.hparams] == [3, 2, 1, 0]
    assert it.hparams[0]["model"] == {}


def test_a_grid_all_at_once():
    assert play_grid(most=0).start() == "+1 +2 +3 +4"


def test_no_axes_is_one_point():
    it = play_grid({"lr": 0.1})
    assert (it.start(), it.exit(1)) == ("+1", ".")


def test_progress_of_a_grid():
    it = play_grid()
    it.start()
    it.exit(1, ExitReason.ERRORED)
    assert it.search.progress({it.ids[1]: 0.5}) == (1 + 0.5) / 3


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
    with pytest.raises(ZeroTrialError, match="got random, expected adaptive_asha"):
        restore(ASHA, LR, snapshot)


def test_training_length():
    assert training_length({"max_length": {"epochs": 3}}) == ("epochs", 3)
    assert training_length({"max_time": 7, "time_metric": "batches", "max_length": None}) == ("batches", 7)
    with pytest.raises(ConfigError, match=r"searcher\.max_time"):
        training_length({"max_length": 5})
