"""The search methods: which trials they make, and how far each goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.master.search.driving import LR, Play, twin
from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master.search.searcher import (
    Create,
    ExitReason,
    Searcher,
    Shutdown,
    Stop,
    build,
    restore,
    training_length,
)

SPACE: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1, "count": 4},
    "ds_config": {"stage": {"type": "categorical", "vals": [0, 1, 2]}},
}
MAX_TIME = 9

configs = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["single", "random", "grid", "adaptive_asha"]),
        "metric": st.just("loss"),
        "max_trials": st.integers(1, 12),
        "max_concurrent_trials": st.integers(0, 5),
        "max_time": st.just(MAX_TIME),
        "time_metric": st.just("batches"),
        "divisor": st.sampled_from([2, 3, 4]),
        "mode": st.sampled_from(["aggressive", "standard", "conservative"]),
        "smaller_is_better": st.booleans(),
    }
)


def run_to_the_end(config: dict[str, Any], seed: int, trouble: float) -> tuple[Searcher, list[str], int]:
    """Random losses in a random order, ``trouble`` of the trials ending badly; before every event
    the search is restarted from JSON.

    Returns the search, how its trials ended, and the largest number that were open at once.
    """
    chance = random.Random(seed)
    search = build(config, SPACE, seed)
    times: dict[str, int] = {}
    stopping: set[str] = set()
    ended: dict[str, str] = {}
    most = over = 0

    def obey(actions: list[Any]) -> None:
        nonlocal most, over
        for action in actions:
            assert not over, "an action after the end"
            if isinstance(action, Create):
                assert action.request_id not in times and action.request_id not in ended
                times[action.request_id] = 0
            elif isinstance(action, Stop):
                assert action.request_id in times and action.request_id not in stopping
                stopping.add(action.request_id)
            else:
                assert isinstance(action, Shutdown) and not times
                over = 1
        most = max(most, len(times))
        assert 0 <= search.progress({}) <= 1

    obey(search.start())
    while times:
        again = twin(search, config, SPACE)
        request_id = chance.choice(list(times))
        if request_id in stopping or times[request_id] >= MAX_TIME or chance.random() < trouble:
            well = request_id in stopping or times[request_id] >= MAX_TIME
            reason = ExitReason.COMPLETED if well else chance.choice(list(ExitReason))
            del times[request_id]
            ended[request_id] = reason.value
            actions, same = search.on_exited(request_id, reason), again.on_exited(request_id, reason)
        else:
            times[request_id] += chance.randint(1, 4)
            metrics = {"loss": chance.choice([0.0, 1.0, 2.0]), "batches": times[request_id]}
            actions, same = search.on_validation(request_id, metrics), again.on_validation(request_id, metrics)
        assert actions == same and search.snapshot() == again.snapshot()
        obey(actions)
    assert over == 1 and search.progress({}) == 1.0
    return search, list(ended.values()), most


@settings(max_examples=60)
@given(configs, st.integers(0, 2**31 - 1))
def test_a_search_without_trouble_creates_as_many_trials_as_it_should(config: dict[str, Any], seed: int):
    search, ended, most = run_to_the_end(config, seed, trouble=0)
    expected = {"single": 1, "random": config["max_trials"], "grid": 12}.get(config["name"])
    if expected is None:
        brackets = search.brackets  # type: ignore[attr-defined]
        expected = sum(bracket.max_trials for bracket in brackets)
        assert expected == max(config["max_trials"], len(brackets))
        # A stopped trial is still open while its successor is created.
        assert most <= 2 * sum(bracket.first_trials() for bracket in brackets) + config["max_trials"]
    elif config["max_concurrent_trials"]:
        assert most <= max(config["max_concurrent_trials"], 1)
    assert len(ended) == expected and set(ended) == {"completed"}


@settings(max_examples=60)
@given(configs, st.integers(0, 2**31 - 1), st.sampled_from([0.1, 0.3, 0.9]))
def test_whatever_happens_it_ends_once(config: dict[str, Any], seed: int, trouble: float):
    _, ended, _ = run_to_the_end(config, seed, trouble)
    valid = [reason for reason in ended if reason != "invalid_hp"]
    if config["name"] in ("random", "adaptive_asha"):
        assert len(valid) <= max(config["max_trials"], 5)  # every bracket has one trial at least


def test_events_after_the_end_change_nothing():
    search = build({"name": "single", "metric": "loss"}, {"lr": 1}, seed=0)
    (created,) = search.start()
    assert isinstance(created, Create)
    assert search.on_exited(created.request_id, ExitReason.ERRORED) == [Shutdown()]
    before = search.snapshot()
    assert search.on_exited(created.request_id, ExitReason.COMPLETED) == []
    assert search.on_validation(created.request_id, {"loss": 1.0}) == []
    assert search.snapshot() == before
    again = twin(search, {"name": "single", "metric": "loss"}, {"lr": 1})
    assert again.over and again.snapshot() == before


def test_a_stranger():
    search = build({"name": "random", "metric": "loss", "max_trials": 2}, SPACE, seed=0)
    search.start()
    with pytest.raises(ZeroTrialError, match="not a trial of this search"):
        search.on_exited("stranger", ExitReason.COMPLETED)


def test_request_ids_are_uuids_and_differ():
    search = build({"name": "random", "metric": "loss", "max_trials": 9}, SPACE, seed=0)
    ids = {action.request_id for action in search.start() if isinstance(action, Create)}
    assert len(ids) == 9 and {len(request_id) for request_id in ids} == {36}


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
