"""The search over ways to train: halving on speed, trials that die, the winner, and the page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import Any

import pytest

from zero_trial.ds_config.keys_running import AutotuningSection
from zero_trial.errors import ConfigError
from zero_trial.planning.tune_result import TuneResult, changed_ds_config, difference, is_plain_json, trial_line
from zero_trial.planning.tune_search import SearchSettings, TuneSearch, refuse_autotuning, search_settings
from zero_trial.planning.tune_space import (
    ACCUMULATION,
    MICRO,
    STAGE,
    Margin,
    Selection,
    TrainingWay,
    TuneFacts,
    Weighed,
    own_way,
    select,
    ways_to_train,
)
from zero_trial.report.report_data import RungOutcome, Status, Tone
from zero_trial.report.sweep_page import render_sweep

NOW = {STAGE: 0, MICRO: 2, ACCUMULATION: 8}
FACTS = TuneFacts(samples=16, current=NOW)


def selection(sizes: int = 4) -> Selection:
    return select(ways_to_train(FACTS), lambda way: Weighed(100, 1 / way.micro_batch), Margin(0, 0), None, sizes=sizes)


def played(search: TuneSearch, speed: Callable[[TrainingWay], float | None]) -> TuneSearch:
    """Run trials whose speed is a function of their way; None dies before it is measured."""
    while (trial := search.next_trial()) is not None:
        value = speed(trial.way)
        if value is None:
            search.ended(trial, "out of memory: rank 1: killed by SIGKILL")
            continue
        for steps in search.rungs:
            if not search.measured(trial, steps, value):
                break
        search.ended(trial)
    return search


def rate(way: TrainingWay) -> float:
    """The fastest is stage 1 at a micro-batch of 8."""
    return 10 - abs(way.mapping[STAGE] - 1) / 5 - abs(log2(way.micro_batch / 8))


def test_the_fastest_is_found_in_a_quarter_of_the_runs() -> None:
    found = selection()
    search = played(TuneSearch(found, SearchSettings(len(found.ways) // 4, 16), own_way(FACTS)), rate)
    best = search.outcome().best()
    assert best is not None
    assert rate(best.way) >= 0.95 * max(map(rate, found.ways))
    assert len(search.trials) == search.planned == len(found.ways) // 4


def test_slow_trials_are_ended_at_the_first_rung() -> None:
    search = played(TuneSearch(selection(), SearchSettings(6, 16), own_way(FACTS)), rate)
    assert search.rungs == (4, 16)
    assert max(search.trials[0].speeds) == 16  # the first always goes on
    assert any(max(trial.speeds) == 4 for trial in search.trials)


@pytest.mark.parametrize(
    ("trials", "steps", "rungs"),
    [(3, 16, (16,)), (6, 16, (4, 16)), (24, 16, (4, 16)), (24, 64, (4, 16, 64)), (24, 8, (8,)), (24, 1, (1,))],
)
def test_no_trial_is_judged_by_fewer_than_four_steps(trials: int, steps: int, rungs: tuple[int, ...]) -> None:
    found = selection()
    assert len(found.ways) >= 16
    assert TuneSearch(found, SearchSettings(trials, steps)).rungs == rungs


def test_steps_that_take_little_time_are_measured_longer() -> None:
    found = TuneSearch(selection(), SearchSettings(6, 16, seconds=4.0))
    trial = found.next_trial()
    assert trial is not None
    assert found.rung_reached(trial, 3, 9.0) is None  # too few, however long they took
    assert found.rung_reached(trial, 9, 0.9) is None  # a quarter of the steps takes a quarter of the time
    assert found.rung_reached(trial, 10, 1.0) == 4
    found.measured(trial, 4, 10.0)
    assert found.rung_reached(trial, 39, 3.9) is None
    assert found.rung_reached(trial, 40, 4.0) == 16
    assert search_settings(AutotuningSection(), 24).seconds == 4.0
    assert search_settings(AutotuningSection(), 24, steps=2).seconds == 0.0


@pytest.mark.parametrize("asked", [{"trials": 0}, {"trials": -1}, {"steps": 0}, {"steps": -3}])
def test_no_trials_and_no_steps_are_refused(asked: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(asked))}"):
        search_settings(AutotuningSection(), 24, **asked)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ('{"a": 1}', True),
        ('{"a": 1} // why', False),
        ('{"a": 1,}', False),
        ("{a: 1}", False),
        ("{'a': 1}", False),
        ("# why\n{}", False),
    ],
)
def test_what_writing_again_would_lose(text: str, plain: bool) -> None:
    assert is_plain_json(text) is plain


def test_a_trial_that_dies_is_recorded_and_the_search_goes_on() -> None:
    search = played(
        TuneSearch(selection(), SearchSettings(5, 16), own_way(FACTS)),
        lambda way: None if way.micro_batch >= 8 else rate(way),
    )
    dead = [trial for trial in search.trials if trial.why]
    best = search.outcome().best()
    assert len(search.trials) == 5
    assert dead
    assert best is not None and not best.why
    assert "out of memory" in trial_line(dead[0], 5, None)


def test_where_all_die_there_is_no_best() -> None:
    search = played(TuneSearch(selection(), SearchSettings(3, 16)), lambda way: None)
    assert search.outcome().best() is None
    assert len({trial.way for trial in search.trials}) == 3


def test_each_way_is_tried_at_most_once() -> None:
    found = selection(sizes=1)
    search = played(TuneSearch(found, SearchSettings(99, 4, halving=False)), rate)
    assert sorted(trial.way.values for trial in search.trials) == sorted(way.values for way in found.ways)
    assert search.rungs == (4,)


def test_the_page_says_what_was_decided() -> None:
    found = select(
        ways_to_train(FACTS),
        lambda way: Weighed(100 * way.micro_batch, 1 / way.micro_batch),
        Margin(0, 0),
        900,
        sizes=3,
    )
    search = played(TuneSearch(found, SearchSettings(4, 16), own_way(FACTS)), rate)
    result = TuneResult("gpt, tuned", '-    "stage": 0\n+    "stage": 1', "zero-trial run ...", (("ranks", "2"),))
    report = search.outcome().report(result)
    decisions = list(itertools.chain(*(ladder.decisions for ladder in report.ladders)))
    assert {decision.verdict for decision in decisions} >= {RungOutcome.FINISHED, RungOutcome.WENT_ON}
    assert report.best is not None and report.best.text == result.diff
    assert any("planned 1.6 KiB" in why for why, _ in report.pruned)
    assert report.status == Status("complete", Tone.GOOD)
    assert search.outcome().report(replace(result, interrupted=True)).status == Status("interrupted", Tone.QUIET)
    page = render_sweep(report)
    assert "steps/s" in page and "&quot;stage&quot;: 1" in page


@pytest.mark.parametrize(
    ("section", "asked", "expected"),
    [
        ({}, {}, SearchSettings(6, 16, 2)),
        ({}, {"trials": 9, "steps": 8}, SearchSettings(9, 8, 2, seconds=0.0)),
        ({"tuner_num_trials": 5}, {}, SearchSettings(5, 16, 2)),
        ({"start_profile_step": 2, "end_profile_step": 5}, {}, SearchSettings(6, 4, 1)),
        ({"fast": False}, {}, SearchSettings(24, 16, 2, halving=False)),
        ({"tuner_type": "gridsearch"}, {}, SearchSettings(24, 16, 2, halving=False)),
    ],
)
def test_the_autotuning_section_sets_the_defaults(
    section: dict[str, Any], asked: dict[str, int], expected: SearchSettings
) -> None:
    assert search_settings(AutotuningSection(**section), 24, **asked) == expected


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"tuner_type": "random"}, "tuner_type"),
        ({"max_train_batch_size": 16}, "max_train_batch_size"),
        ({"min_train_batch_size": 64}, "min_train_batch_size"),
        ({"start_profile_step": 9, "end_profile_step": 8}, "end_profile_step"),
    ],
)
def test_what_the_tuner_does_not_do_is_refused(section: dict[str, Any], key: str) -> None:
    refuse_autotuning(AutotuningSection(), 32)
    with pytest.raises(ConfigError, match=f"autotuning.{key}"):
        refuse_autotuning(AutotuningSection(**section), 32)


def test_the_difference_has_the_changed_lines_alone() -> None:
    before = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    changes = {STAGE: 1, MICRO: 8}
    after = json.loads(changed_ds_config(before, changes))
    assert after == {**before, "zero_optimization": {"stage": 1}, MICRO: 8}
    lines = [
        line
        for line in difference(before, changes, "x").splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert [line[0] for line in lines if "stage" in line] == ["-", "+"]
    assert not difference(before, {}, "x")
