"""Curves as tables: the numbers follow from the definitions by hand; both ends, the corners and the far side are in
them."""

from __future__ import annotations

import math

import pytest

from zero_trial.engine.lr_schedules import Curve, Cycle, OneCycle, RangeTest, Warmup, WarmupCosine, WarmupType

LINEAR = WarmupType.LINEAR


def table(curve: Curve, start: int = -1, count: int = 8) -> list[float]:
    return [curve.lrs(iteration)[0] for iteration in range(start, start + count)]


def test_linear_warmup_starts_at_the_minimum_twice() -> None:
    curve = Warmup([0.0], [1.0], num_steps=4, kind=LINEAR)
    assert table(curve) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_log_warmup_is_full_one_step_earlier() -> None:
    curve = Warmup([0.0], [1.0], num_steps=8)
    expected = [0.0, 0.0] + [math.log(i) / math.log(8) for i in range(2, 9)] + [1.0]
    assert table(curve, count=10) == pytest.approx(expected, abs=1e-15)
    assert curve.lrs(3)[0] == pytest.approx(2 / 3)  # log 4 / log 8


def test_groups_have_their_own_ends() -> None:
    curve = Warmup([0.0, 1.0], [1.0, 3.0], num_steps=2, kind=LINEAR)
    assert [curve.lrs(i) for i in (-1, 1, 2)] == [[0.0, 1.0], [0.5, 2.0], [1.0, 3.0]]


def test_decay_is_linear_to_the_minimum_and_stays() -> None:
    curve = Warmup([0.1], [1.1], num_steps=2, kind=LINEAR, total_steps=6)
    assert table(curve, count=9) == pytest.approx([0.1, 0.1, 0.6, 1.1, 0.85, 0.6, 0.35, 0.1, 0.1])


@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_total_within_the_warmup_jumps_to_the_minimum(total: int) -> None:
    curve = Warmup([0.0], [1.0], num_steps=3, kind=LINEAR, total_steps=total)
    assert table(curve, count=6) == pytest.approx([0.0, 0.0, 1 / 3, 2 / 3, 0.0, 0.0])


def test_cosine_halfway_and_floor() -> None:
    curve = WarmupCosine([2.0], num_steps=2, total_steps=6, min_ratio=0.5, end_ratio=0.1, kind=LINEAR)
    ratios = [0.0, 0.5, 0.75]  # before the first step, then the warmup
    ratios += [0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2 for progress in (0.25, 0.5, 0.75, 1.0, 1.0)]
    assert table(curve) == pytest.approx([2.0 * ratio for ratio in ratios])
    assert curve.ratio(3) == pytest.approx(0.55)


def test_range_test_rises_evenly_or_in_stairs() -> None:
    even = RangeTest([0.1], step_size=2, step_rate=1.0)
    stairs = RangeTest([0.1], step_size=2, step_rate=1.0, staircase=True)
    assert table(even, count=5) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    assert table(stairs, count=5) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_one_cycle_up_down_then_decay() -> None:
    curve = OneCycle(1, Cycle(2.0, 4.0), min_lr=1.0, max_lr=3.0, decay_lr_rate=1.0, decay_step_size=2.0)
    #                                  up        down                  foot  decay: 1/(1+n/2)
    expected = [1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0, 1 / 1.5, 1 / 2.0, 1 / 2.5]
    assert table(curve, count=10) == pytest.approx(expected)


def test_one_cycle_momentum_runs_against_the_lr() -> None:
    curve = OneCycle(2, Cycle(2.0, 2.0), 1.0, 3.0, decay_step_size=1.0, momentum=(0.8, 0.9, 0.5))
    betas = [curve.betas(i) for i in range(-1, 6)]
    first = [pair[0][0] for pair in betas if pair is not None]
    assert first == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.5, 0.9 * 2.0])
    assert betas[0] == [(0.8, 0.99)] * 2
    assert OneCycle(1, Cycle(), 1.0, 3.0).betas(0) is None


def test_no_decay_without_interval_or_rate() -> None:
    for rate, size in ((0.0, 2.0), (1.0, 0.0)):
        curve = OneCycle(1, Cycle(1.0, 1.0), 1.0, 3.0, decay_lr_rate=rate, decay_step_size=size)
        assert table(curve, start=2, count=3) == [1.0, 1.0, 1.0]


def test_stairs_reach_the_peak_even_in_an_uneven_cycle() -> None:
    cycle = Cycle(7.0, 5.0, first_stairs=3, second_stairs=2)
    heights = [cycle.height(i) for i in range(-1, 11)]
    assert heights == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 0.5, 0.5, 0, 0])
