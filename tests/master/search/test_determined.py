"""What an original Determined 0.38.1 master draws and previews, and what this master drew before it
drew the same.

`determined.json`: ``draws`` are searches of experiments that Determined's master created, with the
hyperparameters of each trial as a list of their leaves, names sorted; ``previews`` are answers of
``det preview-search``, as (units, trials); ``earlier`` are searches in the middle, written before
0.38.1's stream was drawn here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.master.search.driving import twin
from zero_trial.experiment.space import power
from zero_trial.master.search.searcher import Action, Create, ExitReason, Searcher, Stream, build

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("determined.json").read_text())
SEARCHES = [
    pytest.param(case["hyperparameters"], section, int(seed), trials, id=f"{number}-{section['name']}-{seed}")
    for number, case in enumerate(RECORDED["draws"])
    for section in case["searchers"]
    for seed, trials in case["trials"].items()
]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name in sorted(value):
            yield from leaves(value[name])
    else:
        yield value


def drawn(action: Action) -> list[Any]:
    assert isinstance(action, Create)
    return [action.request_id, action.seed, list(leaves(action.hparams))]


@pytest.mark.parametrize(("space", "section", "seed", "trials"), SEARCHES)
def test_the_trials_of_a_genuine_master(
    space: dict[str, Any], section: dict[str, Any], seed: int, trials: list[list[Any]]
) -> None:
    """Equal to the last bit, log hyperparameters too, and as JSON: a whole double is 1, not 1.0."""
    found = [drawn(action) for action in build(section, space, seed).start()]
    assert json.dumps(found) == json.dumps(trials[: len(found)])
    assert len(found) == {"single": 1, "grid": len(trials)}.get(section["name"], 5)


@pytest.mark.parametrize(("section", "trials"), RECORDED["previews"])
def test_the_previews_of_a_genuine_master(section: dict[str, Any], trials: list[list[int]]) -> None:
    asha = {"name": "adaptive_asha", "metric": "loss", "time_metric": "batches", **section}
    found = build(asha, {}, 0).preview()
    assert [[each.units, each.count] for each in found] == trials and {each.unit for each in found} == {"batches"}


def test_the_order_in_which_trials_end_does_not_matter() -> None:
    """The fourth trial of five draws what it draws in Determined's master's batch of five."""
    case = RECORDED["draws"][0]
    search = build({"name": "random", "metric": "l", "max_trials": 5, "max_concurrent_trials": 2}, *_space_and_seed())
    first, second = search.start()
    assert isinstance(first, Create) and isinstance(second, Create)
    later = [
        *search.on_exited(second.request_id, ExitReason.ERRORED),
        *search.on_exited(first.request_id, ExitReason.COMPLETED),
    ]
    assert [drawn(action) for action in (first, second, *later)] == case["trials"]["42"][:4]


def test_trials_that_follow_early_ends_go_on_with_the_stream() -> None:
    """adaptive_asha creates a trial for one that was stopped and for one that failed; a restart in
    between changes nothing."""
    section = {
        "name": "adaptive_asha",
        "metric": "l",
        "max_trials": 8,
        "max_time": 64,
        "time_metric": "batches",
        "max_concurrent_trials": 2,
        "mode": "aggressive",
    }
    space, seed = _space_and_seed()
    search = build(section, space, seed)
    created = [action for action in search.start() if isinstance(action, Create)]

    def after(actions: list[Action]) -> Searcher:
        created.extend(action for action in actions if isinstance(action, Create))
        return twin(search, section, space)

    search = after(search.on_exited(created[0].request_id, ExitReason.ERRORED))
    search = after(search.on_exited(created[1].request_id, ExitReason.ERRORED))
    search = after(search.on_validation(created[2].request_id, {"l": 1.0, "batches": 64}))
    assert [drawn(action) for action in created] == RECORDED["draws"][0]["trials"]["42"]


def _space_and_seed() -> tuple[dict[str, Any], int]:
    return RECORDED["draws"][0]["hyperparameters"], 42


def test_the_state_is_a_seed_and_a_count_of_words() -> None:
    stream = Stream(5489)
    twister = [stream._word() for _ in range(1400)]  # numpy.random.RandomState(5489), more than two blocks of 624
    assert twister[:3] == [3499211612, 581869302, 3890346734]
    assert stream.as_json() == {"seed": 5489, "words": 1400}
    again = Stream(5489, 700)
    assert [again._word() for _ in range(700)] == twister[700:]


def test_integers_and_doubles() -> None:
    stream = Stream(1)
    assert stream.below(1) == 0 and stream.as_json()["words"] == 0  # nothing to choose
    assert {stream.below(5) for _ in range(200)} == set(range(5))
    before = stream.as_json()["words"]
    assert 0 <= stream.below(2**32 + 1) <= 2**32
    assert (stream.as_json()["words"] - before) % 2 == 0  # two words at a time
    assert [Stream(0).unit(), Stream(42).unit()] == [0.5488135039273248, 0.3745401188473625]  # as numpy's


@pytest.mark.parametrize("exponent", [0.0, 1.0, -3.0, 7.0, 0.5, -0.5, 1.75, -2.25, 0.001, -4.999, 30.5])
@pytest.mark.parametrize("base", [10.0, 2.0, 1.0, 0.3, 2.718281828459045])
def test_powers_are_right_to_three_units_in_the_last_place(base: float, exponent: float) -> None:
    exact = base**exponent
    assert abs(power(base, exponent) - exact) <= 3 * math.ulp(exact) * max(abs(exponent) / 8, 1)


def test_powers_out_of_range() -> None:
    assert power(10.0, -400.25) == 0.0
    with pytest.raises(OverflowError):
        power(10.0, 400.25)
