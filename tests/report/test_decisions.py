"""A search played again: what it says it stopped, and why, is what the search did."""

from __future__ import annotations

import math
from typing import Any

from tests.report.searched import CONFIG
from zero_trial.master.search import Stop, build
from zero_trial.report.data import RungOutcome
from zero_trial.report.master_reader import RungMeasurement, bracket_histories, ordinal

ONE_BRACKET: dict[str, Any] = {
    **CONFIG,
    "searcher": {**CONFIG["searcher"], "bracket_rungs": [2], "divisor": 2, "max_time": 4},
}
NAMES = {str(number): str(number) for number in range(99)}


def played(losses: list[tuple[int, float]], config: dict[str, Any] = ONE_BRACKET) -> tuple[Any, list[tuple[str, str]]]:
    """Every trial reports in turn at the first rung: what the report says, and whom the search really stopped."""
    search = build(config["searcher"], config["hyperparameters"], 3)
    ids = [action.request_id for action in search.start()]
    stops, measured = [], []
    for steps, loss in losses:
        request = ids[len(measured)]
        measured.append(RungMeasurement(request, steps, loss))
        for action in search.on_validation(request, {"batches": steps, "validation_loss": loss}):
            if isinstance(action, Stop):
                stops.append(action.request_id)
            else:
                ids.append(action.request_id)
    return bracket_histories(config, search.snapshot(), measured, {}), [(request, "stopped") for request in stops]


def test_the_worse_of_two_is_stopped_and_told_why() -> None:
    (ladder,), stops = played([(2, 1.0), (2, 2.0)])
    assert ladder.units == (2, 4)
    first, second = ladder.decisions
    assert (first.verdict, first.why) == (RungOutcome.WENT_ON, "The first to be measured here goes on.")
    assert second.verdict is RungOutcome.STOPPED
    assert second.why == "2nd of the 2 measured here so far; the best 1 may go on (1 in 2)."
    assert [(second.trial, "stopped")] == stops


def test_a_late_better_one_goes_on() -> None:
    (ladder,), stops = played([(2, 2.0), (2, 1.0)])
    assert [decision.verdict for decision in ladder.decisions] == [RungOutcome.WENT_ON, RungOutcome.WENT_ON]
    assert stops == []


def test_one_validation_may_pass_both_rungs() -> None:
    (ladder,), _ = played([(4, 1.0)])
    assert [(d.rung, d.units, d.verdict) for d in ladder.decisions] == [
        (0, 2, RungOutcome.WENT_ON),
        (1, 4, RungOutcome.FINISHED),
    ]


def test_not_a_number_is_behind_all_others() -> None:
    (ladder,), _ = played([(2, 5.0), (2, math.nan)])
    assert ladder.decisions[1].verdict is RungOutcome.STOPPED


def test_another_search_or_a_broken_snapshot_has_no_ladders() -> None:
    grid = {**CONFIG, "searcher": {"name": "grid", "metric": "validation_loss", "max_concurrent_trials": 1}}
    assert bracket_histories(grid, {"kind": "grid"}, [], NAMES) == ()
    assert bracket_histories(ONE_BRACKET, {}, [], NAMES) == ()
    assert bracket_histories(ONE_BRACKET, {"kind": "adaptive_asha", "draws": 3}, [], NAMES) == ()


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 112)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "102nd",
        "112th",
    ]
