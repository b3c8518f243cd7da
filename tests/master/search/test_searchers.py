"""The searchers single, random and grid, and how an experiment asks for one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.search.driving import LR, Play
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master.search.searcher import ExitReason, build, restore, training_length

DONE, ERRORED, CANCELED = ExitReason.COMPLETED, ExitReason.ERRORED, ExitReason.CANCELED
RANDOM, GRID = {"name": "random", "max_trials": 3}, {"name": "grid", "max_concurrent_trials": 2}
STAGES = {"stage": {"type": "categorical", "vals": [0, 1, 2, 3]}, "model": {}}


def play(section: dict[str, Any], space: dict[str, Any] = LR) -> Play:
    return Play(build({"metric": "loss", **section}, space, seed=1))


@pytest.mark.parametrize(
    ("section", "space", "started", "ends"),
    [
        ({**RANDOM, "max_concurrent_trials": 2}, LR, "+1 +2", [((2, DONE), "+3"), ((1, DONE), ""), ((3, DONE), ".")]),
        ({**RANDOM, "max_concurrent_trials": 0}, LR, "+1 +2 +3", []),
        ({**RANDOM, "max_concurrent_trials": 16}, LR, "+1 +2 +3", []),
        ({**RANDOM, "max_trials": 99}, LR, " ".join(f"+{n}" for n in range(1, 17)), []),  # sixteen by default
        # errors count, and a canceled search has not failed
        ({**RANDOM, "max_concurrent_trials": 1, "max_trials": 2}, LR, "+1", [((1, ERRORED), "+2"), ((2, ERRORED), ".")]),
        ({**RANDOM, "max_trials": 1}, LR, "+1", [((1, CANCELED), ".")]),
        ({"name": "single"}, {"lr": 0.1}, "+1", [((1, DONE), ".")]),
        (GRID, STAGES, "+1 +2", [((1, DONE), "+3"), ((2, DONE), "+4"), ((4, DONE), ""), ((3, DONE), ".")]),
        ({**GRID, "max_concurrent_trials": 0}, STAGES, "+1 +2 +3 +4", []),
        (GRID, {"lr": 0.1}, "+1", [((1, DONE), ".")]),  # no axes are one point
    ],
)  # fmt: skip
def test_which_trials_are_created(
    section: dict[str, Any], space: dict[str, Any], started: str, ends: list[tuple[tuple[int, ExitReason], str]]
):
    it = play(section, space)
    assert it.start() == started
    assert it.val(1, 10, 0.5) == ""  # validations decide nothing
    assert [it.exit(*event) for event, _ in ends] == [answer for _, answer in ends]
    if section["name"] == "random":
        assert len({values["lr"] for values in it.hparams}) == len(set(it.seeds)) == len(it.ids)
    elif space is STAGES:  # every point once, from the end
        assert [(values["stage"], values["model"]) for values in it.hparams] == [(stage, {}) for stage in (3, 2, 1, 0)]
    else:
        assert it.hparams == [{"lr": 0.1}]


def test_progress():
    it = play({**RANDOM, "max_concurrent_trials": 2})
    it.start()
    # of the trials that are there, not of all three
    assert it.search.progress({it.ids[0]: 0.5, it.ids[1]: 0.25}) == pytest.approx(0.75 / 2)
    it.exit(1, ExitReason.ERRORED)
    # what is over counts as whole
    assert it.search.progress({it.ids[1]: 0.25}) == pytest.approx((1 + 0.25) / 3)
    it.exit(2)
    it.exit(3)
    assert it.search.progress({}) == 1.0
    it = play(GRID, STAGES)
    it.start()
    it.exit(1, ERRORED)
    assert it.search.progress({it.ids[1]: 0.5}) == (1 + 0.5) / 3


ASHA = {"name": "adaptive_asha", "metric": "m", "max_trials": 4, "max_time": 9, "time_metric": "epochs"}


@pytest.mark.parametrize("name", ["single", "random", "grid", "adaptive_asha"])
def test_every_kind(name: str):
    space = {"lr": {**LR["lr"], "count": 3}}
    search = build({**ASHA, "name": name}, space, seed=5)
    assert search.kind == name
    again = restore({**ASHA, "name": name}, space, search.snapshot())
    assert again.snapshot() == search.snapshot()
    started = search.start()
    assert again.start() == started
    assert build({**ASHA, "name": name}, space, seed=6).start() != started  # the seed decides
    if name != "adaptive_asha":
        with pytest.raises(ZeroTrialError, match=f"got {name}, expected adaptive_asha"):
            restore(ASHA, LR, search.snapshot())


def test_nulls_are_defaults():
    nulls: dict[str, Any] = dict.fromkeys(
        ("mode", "divisor", "max_rungs", "max_concurrent_trials", "bracket_rungs", "smaller_is_better", "max_length")
    )
    assert build({**ASHA, **nulls}, LR, seed=5).snapshot() == build(ASHA, LR, seed=5).snapshot()
    with pytest.raises(ConfigError, match=r"searcher.name: no such searcher: got pbt"):
        build({"name": "pbt"}, LR, seed=5)


def test_training_length():
    assert training_length({"max_length": {"epochs": 3}}) == ("epochs", 3)
    assert training_length({"max_time": 7, "time_metric": "batches", "max_length": None}) == ("batches", 7)
    with pytest.raises(ConfigError, match=r"searcher\.max_time"):
        training_length({"max_length": 5})
