"""adaptive_asha: brackets, rungs, and which trials go on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.master.search.driving import LR, Play, twin
from zero_trial.errors import ConfigError
from zero_trial.master.search.searcher import (
    WORST,
    Bracket,
    ExitReason,
    MetricMissing,
    Rung,
    Stop,
    build,
    divide,
    rungs_by_mode,
)


@pytest.mark.parametrize(
    ("max_trials", "max_time", "more", "expected"),
    [
        # Rungs: min(5, log4(16) + 1, log4(16) + 1) = 3, of which standard takes (3 - 1) // 2 + 1 =
        # 2 to 3. Weights 4^2/3 = 5.33 and 4^1/2 = 2: 11.6 and 4.4 of 16 trials, and the one that is
        # left goes to the first.
        (16, 16, {}, [(3, 12, 8), (2, 4, 8)]),
        # log4(64) + 1 = 4 rungs, one bracket.
        (64, 64, {"mode": "aggressive"}, [(4, 64, 16)]),
        # Weights 16/3, 4/2, 1/1 of 8.33: 10.24, 3.84, 1.92, and two are left. Sixteen at a time are
        # 5, 5, 5 and one more for the first.
        (16, 16, {"mode": "conservative"}, [(3, 12, 6), (2, 3, 5), (1, 1, 5)]),
        # Two at a time are fewer than three brackets: one each.
        (16, 16, {"mode": "conservative", "max_concurrent_trials": 2}, [(3, 12, 1), (2, 3, 1), (1, 1, 1)]),
        # Zero at a time: as many as the last bracket has trials, or the divisor.
        (16, 16, {"mode": "conservative", "max_concurrent_trials": 0}, [(3, 12, 4), (2, 3, 4), (1, 1, 4)]),
        (100, 100, {"mode": "aggressive", "divisor": 3, "max_concurrent_trials": 0}, [(5, 100, 100)]),
        # Nothing to divide.
        (1, 1, {}, [(1, 1, 16)]),
        (1, 1000, {}, [(1, 1, 16)]),
        (1000, 1, {}, [(1, 1000, 16)]),
        # Rungs given by hand are taken as they are, tallest first. Weights 4/3 and 1: 5.7 and 4.3
        # of 10.
        (10, 2, {"divisor": 2, "bracket_rungs": [1, 3]}, [(3, 6, 8), (1, 4, 8)]),
        # max_rungs 2: standard takes 1 to 2. Weights 4/2 and 1: 6.7 and 3.3 of 10.
        (10, 100, {"max_rungs": 2}, [(2, 7, 8), (1, 3, 8)]),
        # Every bracket has a trial, even where that is more than max_trials: weights 2, 5.33 and 16
        # give 0, 0 and 0 of 1.
        (1, 4, {"bracket_rungs": [2, 3]}, [(3, 1, 8), (2, 1, 8)]),
    ],
)
def test_brackets_by_hand(max_trials: int, max_time: int, more: dict[str, Any], expected: list[tuple[int, int, int]]):
    assert divide({"max_trials": max_trials, **more}, max_time) == expected


@pytest.mark.parametrize(
    ("mode", "most", "expected"),
    [
        ("aggressive", 5, [5]),
        ("standard", 5, [3, 4, 5]),
        ("standard", 4, [2, 3, 4]),
        ("standard", 1, [1]),
        ("conservative", 4, [1, 2, 3, 4]),
    ],
)
def test_modes(mode: str, most: int, expected: list[int]):
    assert rungs_by_mode(mode, most) == expected


def test_an_unknown_mode():
    with pytest.raises(ConfigError, match=r"searcher.mode: no such mode: got brave"):
        rungs_by_mode("brave", 3)


@pytest.mark.parametrize(
    ("rungs", "divisor", "max_time", "expected"),
    [(3, 4, 100, [6, 25, 100]), (5, 4, 100, [1, 1, 6, 25, 100]), (1, 4, 7, [7]), (3, 2.5, 10, [1, 4, 10])],
)
def test_units_of_a_ladder(rungs: int, divisor: float, max_time: int, expected: list[int]):
    assert [rung.units for rung in Bracket.ladder(rungs, divisor, max_time, 8, 8).rungs] == expected


def test_a_rung_is_ascending_and_the_newcomer_stands_before_its_equals():
    rung = Rung(1)
    assert [rung.insert(metric, name) for metric, name in [(2.0, "a"), (1.0, "b"), (2.0, "c"), (3.0, "d")]] == [
        0,
        0,
        1,
        3,
    ]
    assert [name for _, name in rung.entries] == ["b", "c", "a", "d"]


def test_the_best_quarter_goes_on():
    """With divisor 4 the eighth to be measured goes on as the second best, since 8 / 4 = 2 may; the
    seventh did not, 7 / 4 = 1."""
    bracket = Bracket.ladder(2, 4, 8, 8, 8)
    bracket.position = dict.fromkeys("abcdefgh", 0)
    for name, metric in zip("abcdef", [1, 9, 8, 7, 6, 5], strict=True):
        assert bracket.climb(name, 2, metric) is (name != "a")
    assert bracket.climb("g", 2, 2.0)
    assert not bracket.climb("h", 2, 1.5)
    assert bracket.position["h"] == 1 and bracket.position["g"] == 0


def test_a_trial_that_ends_early_is_last():
    bracket = Bracket.ladder(2, 2, 4, 4, 4)
    bracket.position = {"a": 0, "b": 0}
    bracket.drop_early("a")
    assert bracket.rungs[0].entries == [(WORST, "a")]
    assert not bracket.climb("b", 2, 1e300)


TWO_RUNGS = {
    "name": "adaptive_asha",
    "metric": "loss",
    "time_metric": "batches",
    "max_time": 4,
    "max_trials": 4,
    "max_concurrent_trials": 2,
    "divisor": 2,
    "bracket_rungs": [2],
}
DONE, ERRORED, CANCELED = ExitReason.COMPLETED, ExitReason.ERRORED, ExitReason.CANCELED


def play(**changes: Any) -> Play:
    return Play(build({**TWO_RUNGS, **changes}, LR, seed=3))


def test_a_whole_number_that_no_float_holds_is_an_infinite_loss():
    it = play()
    it.start()
    assert it.val(1, 2, -(10**400)) == ""
    assert it.val(2, 2, 10**400) == "-2 +3"  # the second of two
    with pytest.raises(MetricMissing):
        it.search.on_validation(it.ids[0], {"loss": 1.0, "batches": 10**400})


def test_a_stopped_trial_says_no_more():
    it = play()
    it.start()
    it.val(1, 2, 1.0)
    assert it.val(2, 2, 2.0) == "-2 +3"
    before = it.search.snapshot()
    assert it.val(2, 3, 0.1) == "" and it.search.snapshot() == before
    assert it.exit(2, ERRORED) == ""  # it fell over on its way out: measured and replaced already
    assert it.val(3, 2, 1.5) == "-3 +4"  # 1.0 1.5 2.0, no fourth: second of three


def test_a_trial_at_the_top_has_trained_to_its_end():
    it = play(max_trials=2)
    it.start()
    it.val(1, 2, 1.0)
    (stopped,) = it.search.on_validation(it.ids[1], {"loss": 2.0, "batches": 2})
    (finished,) = it.search.on_validation(it.ids[0], {"loss": 1.0, "batches": 4})
    assert (stopped, finished) == (Stop(it.ids[1]), Stop(it.ids[0], finished=True))


SMALL = {"max_trials": 2}
# What happens to trials, in order, and what the search answers: (trial, batches, loss) is a
# validation, (trial, reason) an end.
STORIES: dict[str, tuple[dict[str, Any], str, list[tuple[tuple[Any, ...], str]]]] = {
    "a whole search": ({}, "+1 +2", [
        ((1, 1, 1.0), ""),  # below the first rung
        ((1, 2, 1.0), ""),  # the best of one goes on
        ((2, 2, 2.0), "-2 +3"),  # second of two, one goes on; three trials of four
        ((2, DONE), ""),
        ((3, 2, 0.5), ""),  # first of three
        ((1, 4, 0.9), "-1 +4"),  # the top rung ends every trial
        ((4, 2, 0.7), ""),  # 0.5 0.7 1.0 2.0: second of four, two go on
        ((3, 4, 0.4), "-3"),  # four trials of four: no fifth
        ((4, 4, 0.6), "-4"),
        ((1, DONE), ""), ((3, DONE), ""), ((4, DONE), "."),
    ]),
    "one validation passes several rungs": ({}, "+1 +2", [
        ((1, 4, 1.0), "-1 +3"),  # first of one at rung 1, and at the top
        ((2, 4, 2.0), "-2 +4"),  # second of two at rung 1: the top never sees it
    ]),
    "a rung is passed late": ({}, "+1 +2", [
        ((1, 3, 1.0), ""),  # measured at rung 1 (2 <= 3), waits for 4
        ((1, 3, 0.1), ""),  # not measured again: its next rung is the top
        ((2, 2, 0.5), ""),  # first of two: 1.0 counts
    ]),
    "of equals the newcomer goes on": ({}, "+1 +2", [((1, 2, 1.0), ""), ((2, 2, 1.0), "")]),
    "larger is better": ({"smaller_is_better": False}, "+1 +2", [
        ((1, 2, 0.5), ""),
        ((2, 2, 0.9), ""),  # better than 0.5: first of two
        ((1, 4, 0.6), "-1 +3"),
        ((3, 2, 0.4), "-3 +4"),  # third of three
    ]),
    "an error is the worst metric": ({}, "+1 +2", [
        ((1, ERRORED), "+3"),  # three trials of four
        ((2, 2, 9.0), ""),  # first of two: the error is behind it
        ((3, 2, 10.0), "-3 +4"),  # 9, 10, error: second of three, one goes on
        ((4, 2, 9.5), ""),  # 9, 9.5, 10, error: second of four, two go on
        ((4, CANCELED), ""),  # as an error, and all four trials are used
    ]),
    "an error at the second rung": ({}, "+1 +2", [
        ((1, 2, 1.0), ""),
        ((1, ERRORED), "+3"),  # the worst at rung 2, its 1.0 stays at rung 1
        ((2, 2, 2.0), "-2 +4"),  # second of two
    ]),
    "all in error": (SMALL, "+1 +2", [((1, ERRORED), ""), ((2, ERRORED), ".")]),
    "not a number is the worst": ({}, "+1 +2", [
        ((1, 2, math.nan), ""),  # the best of one, whatever it is
        ((2, 2, 3.0), ""),  # first of two
        ((1, 4, "NaN"), "-1 +3"),
        ((3, 2, "Infinity"), "-3 +4"),  # 3.0, then the worst: second of three, one goes on
    ]),
    "what ends before the top is not replaced": ({}, "+1 +2", [((1, DONE), ""), ((2, DONE), ".")]),
    "one rung is random search": ({"bracket_rungs": [1], "max_trials": 3}, "+1 +2", [
        ((1, 3, 0.0), ""), ((1, 4, 9.0), "-1 +3"), ((2, 5, 1.0), "-2"),
    ]),
    # Rungs min(5, log2(4) + 1 = 3, log2(8) + 1 = 4) = 3; standard takes 2 and 3. Weights 4/3 and 1:
    # 4.6 and 3.4 of 8, so 5 and 3. Bracket A after 1, 2, 4 batches: trials 1, 2. Bracket B after 2,
    # 4: trials 3, 4.
    "two brackets": ({"bracket_rungs": [], "max_trials": 8, "max_concurrent_trials": 4}, "+1 +2 +3 +4", [
        ((1, 1, 1.0), ""),
        ((3, 1, 9.0), ""),  # below B's first rung
        ((2, 1, 2.0), "-2 +5"),  # A: second of two
        ((3, 2, 9.0), ""),  # B: first of one, though A has better
        ((4, 2, 10.0), "-4 +6"),  # B: second of two
        ((6, 1, 0.1), ""),  # B again
        ((5, 1, 3.0), "-5 +7"),  # A: third of three; the fourth of five
        ((7, 1, 4.0), "-7 +8"),
        ((8, 1, 5.0), "-8"),  # A has had its five
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_a_search_by_hand(name: str):
    changes, started, events = STORIES[name]
    it = play(**changes)
    assert it.start() == started
    for event, answer in events:
        assert (it.exit(*event) if len(event) == 2 else it.val(*event)) == answer, event
    if name == "one validation passes several rungs":
        (bracket,) = it.search.brackets  # type: ignore[attr-defined]
        assert [len(rung.entries) for rung in bracket.rungs] == [2, 1]


def test_max_length_is_the_older_form():
    config = {key: value for key, value in TWO_RUNGS.items() if key not in ("max_time", "time_metric")}
    search = build({**config, "max_length": {"batches": 4}}, LR, seed=3)
    assert search.snapshot() == build(TWO_RUNGS, LR, seed=3).snapshot()
    epochs = Play(build({**config, "max_length": {"epochs": 4}}, LR, seed=3))
    epochs.start()
    assert epochs.val(1, 100, 1.0, epochs=1) == ""
    assert epochs.val(1, 400, 1.0, epochs=4) == "-1 +3"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"batches": 2},
            'searcher.metric: the validation metrics contain no number named "loss": got batches in the validation metrics',
        ),
        ({"loss": 1.0}, 'searcher.time_metric: the validation metrics contain no number named "batches"'),
        ({}, "got no metrics in the validation metrics"),
        ({"loss": "low", "batches": 2}, "got 'low'"),
        ({"loss": True, "batches": 2}, "got True"),
        ({"loss": 1.0, "batches": math.nan}, "got nan"),
    ],
)
def test_a_metric_that_is_missing_changes_nothing(metrics: dict[str, Any], message: str):
    it = play()
    it.start()
    before = it.search.snapshot()
    with pytest.raises(MetricMissing) as error:
        it.search.on_validation(it.ids[0], metrics)
    assert message in str(error.value)
    assert it.search.snapshot() == before
    assert it.exit(1, ERRORED) == "+3"  # what the caller does next


def test_progress():
    it = play()
    it.start()
    assert it.search.progress({}) == 0
    it.val(1, 2, 1.0)
    it.val(2, 2, 2.0)
    # two of four measured, a fifth on top for the rest
    assert it.search.progress({}) == pytest.approx(2 / (1.2 * 4))
    it.exit(2)
    it.val(3, 2, 3.0)
    it.exit(3)
    it.val(4, 2, 4.0)
    it.exit(4)
    # more than the three of four that are over
    assert it.search.progress({}) == pytest.approx(4 / 4.8)
    it.val(1, 4, 1.0)
    it.exit(1)
    assert it.search.progress({}) == 1.0


def test_a_restart_in_the_middle():
    it = play()
    it.start()
    it.val(1, 2, 1.0)
    again = play()
    again.search, again.ids = twin(it.search, TWO_RUNGS, LR), list(it.ids)
    for each in (it, again):
        assert each.val(2, 2, 2.0) == "-2 +3"
    assert again.ids == it.ids and again.hparams == it.hparams[-1:] and again.seeds == it.seeds[-1:]
