"""Parameters dealt out to numbered places: the one way there is, and nothing where there are two or none."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_trial.errors import CheckpointError
from zero_trial.importing.numbered_state import deal


def by_shape(shapes: Mapping[str, int], places: Sequence[Sequence[int]]) -> list[list[tuple[str, int]]]:
    """Shapes are single numbers here."""
    return deal(
        list(shapes),
        [len(row) for row in places],
        lambda name, group, place: place + 1 if places[group][place] == shapes[name] else -1,
        "test",
    )


def test_groups_that_take_turns() -> None:
    shapes = {"a.weight": 9, "a.bias": 3, "b.weight": 9, "b.bias": 3}
    assert by_shape(shapes, [[9, 9], [3, 3]]) == [[("a.weight", 0), ("b.weight", 1)], [("a.bias", 0), ("b.bias", 1)]]


def test_what_is_left_over_is_frozen() -> None:
    assert by_shape({"a": 1, "b": 2, "c": 3}, [[1, 3]]) == [[("a", 0), ("c", 1)]]


def test_two_ways_are_an_error_with_a_way_out() -> None:
    with pytest.raises(
        CheckpointError, match=r"test: .*cannot be told from their shapes: got more than one way.*--names FILE"
    ):
        by_shape({"a": 1, "b": 1}, [[1]])
    with pytest.raises(CheckpointError, match="more than one way"):
        by_shape({"a": 1, "b": 1}, [[1], [1]])


def test_no_way_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no way to match them"):
        by_shape({"a": 1, "b": 2}, [[2, 1]])


def test_runs_of_a_flat_buffer() -> None:
    """Places may be offsets: then a parameter takes as many as it has elements."""
    sizes = {"a": 2, "b": 5, "c": 3}
    found = deal(list(sizes), [5], lambda name, group, place: place + sizes[name] if name != "b" else -1, "test")
    assert found == [[("a", 0), ("c", 2)]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_against_all_ways(shapes: list[int], data: st.DataObject) -> None:
    """Every parameter in one of two groups or frozen: the answer is right if it is the only one, and an error else."""
    homes = [data.draw(st.integers(-1, 1)) for _ in shapes]
    places = [[shape for shape, home in zip(shapes, homes, strict=True) if home == group] for group in (0, 1)]
    ways = {
        way
        for way in itertools.product((-1, 0, 1), repeat=len(shapes))
        if all(
            [shape for shape, home in zip(shapes, way, strict=True) if home == group] == places[group]
            for group in (0, 1)
        )
    }
    named = {f"p{index}": shape for index, shape in enumerate(shapes)}
    if len(ways) > 1:
        with pytest.raises(CheckpointError, match="more than one way"):
            by_shape(named, places)
        return
    found = by_shape(named, places)
    assert [[name for name, _ in row] for row in found] == [
        [f"p{index}" for index, home in enumerate(homes) if home == group] for group in (0, 1)
    ]
