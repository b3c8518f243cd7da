"""What all searchers share: draws, the trials of a search, events and snapshots."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.master.search.driving import twin
from zero_trial.errors import ZeroTrialError
from zero_trial.master.search.searcher import Create, ExitReason, Searcher, Shutdown, Stop, build

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
