"""Tests for zero_trial/sharding/unshard.py."""

from __future__ import annotations

import pytest

from zero_trial.sharding.unshard import UseOrder

SIZES = {"root": 50, "h0": 100, "h1": 100, "h2": 100}
STEP = ["root", "h0", "h1", "h2", "h2", "h1", "h0"]


def after_one_step(order: list[str] = STEP) -> UseOrder:
    uses = UseOrder(SIZES)
    uses.start_step()
    for block in order:
        uses.visit(block)
    uses.start_step()
    return uses


def test_the_last_step_predicts_the_next() -> None:
    uses = after_one_step()
    uses.visit("root")
    assert uses.upcoming(100) == ["h0"]
    uses.visit("h0")
    assert uses.upcoming(200) == ["h1", "h2"]


def test_the_first_step_predicts_nothing() -> None:
    uses = UseOrder(SIZES)
    assert not uses.on_track
    uses.visit("root")
    assert uses.upcoming(1000) == []
    assert uses.distance("h0") is None
    uses.start_step()
    assert uses.on_track


@pytest.mark.parametrize(
    ("visited", "budget", "expected"),
    [
        (1, 1, ["h0"]),  # the next always, however large
        (1, 199, ["h0"]),
        (1, 200, ["h0", "h1"]),
        (1, 10_000, ["h0", "h1", "h2"]),  # each once
        (4, 150, ["h2"]),
        (4, 200, ["h2", "h1"]),
        (7, 10_000, []),  # the step is over
    ],
)
def test_upcoming_within_a_budget(visited: int, budget: int, expected: list[str]) -> None:
    uses = after_one_step()
    for block in STEP[:visited]:
        uses.visit(block)
    assert uses.upcoming(budget) == expected


def test_a_step_that_leaves_the_order_is_followed_and_becomes_the_next_prediction() -> None:
    uses = after_one_step()
    other = ["root", "h1", "h0", "h0", "h1"]
    uses.visit("root")
    assert uses.on_track
    for block in other[1:]:
        uses.visit(block)
        assert not uses.on_track
        assert uses.upcoming(1000) == []
        assert uses.distance("h0") is None
    uses.start_step()
    uses.visit("root")
    assert uses.upcoming(100) == ["h1"]


def test_a_step_that_goes_on_longer_than_the_last_is_off_track() -> None:
    uses = after_one_step(["root"])
    uses.visit("root")
    assert uses.on_track
    uses.visit("h0")
    assert not uses.on_track


def test_a_step_without_any_use_forgets_nothing() -> None:
    uses = after_one_step()
    uses.start_step()
    uses.visit("root")
    assert uses.upcoming(1) == ["h0"]


@pytest.mark.parametrize(
    ("visited", "block", "expected"), [(2, "h0", 400), (3, "h1", 200), (4, "h2", 0), (6, "h1", None), (1, "h0", 0)]
)
def test_distance_counts_what_is_used_before(visited: int, block: str, expected: int | None) -> None:
    uses = after_one_step()
    for used in STEP[:visited]:
        uses.visit(used)
    assert uses.distance(block) == expected


class CountedSizes(dict[str, int]):
    """Counts how often a size is read."""

    reads = 0

    def __getitem__(self, block: str) -> int:
        self.reads += 1
        return super().__getitem__(block)


def test_a_step_of_many_blocks_and_micro_batches_costs_time_in_proportion_to_its_uses() -> None:
    blocks = [f"h{index}" for index in range(50)]
    sizes = CountedSizes(dict.fromkeys(blocks, 100))
    step = [*blocks, *reversed(blocks)] * 20
    uses = UseOrder(sizes)
    for _ in range(2):
        uses.start_step()
        for block in step:
            uses.visit(block)
            uses.upcoming(200)
            uses.distance(block)
    assert uses.on_track
    assert sizes.reads < 10 * len(step)
