"""Which machines a trial gets, and the numbers of their slots."""

from __future__ import annotations

import pytest

from zero_trial.master.agent.resources import Node, fit, moved, numbered, shape


@pytest.mark.parametrize(
    ("slots", "sizes", "parts"),
    [
        (1, [2, 2], (1, 1)),
        (2, [2, 2], (1, 2)),
        (2, [1, 1], (2, 1)),
        (4, [2, 2], (2, 2)),
        (3, [2, 2], None),
        (3, [2, 4], (1, 3)),
        (4, [2, 1, 2], (2, 2)),
        (6, [4, 4, 2], (2, 3)),
        (9, [4, 4], None),
        (0, [2], (1, 0)),
        (0, [], None),
    ],
)
def test_the_fewest_machines_in_equal_parts(slots: int, sizes: list[int], parts: tuple[int, int] | None) -> None:
    assert shape(slots, sizes) == parts


@pytest.mark.parametrize(
    ("nodes", "each", "free", "taken"),
    [
        (1, 1, [(0, 1), (3,)], (3,)),  # whole machines stay whole
        (1, 2, [(0,), (2, 3)], (2, 3)),
        (2, 1, [(1,), (2, 3)], (1, 2)),
        (2, 2, [(0, 1), (3,)], None),
        (1, 1, [(5, 4)], (4,)),
    ],
)
def test_free_slots(nodes: int, each: int, free: list[tuple[int, ...]], taken: tuple[int, ...] | None) -> None:
    assert fit(nodes, each, free) == taken


A, B = Node("a", 2, 0), Node("b", 2, 2)


@pytest.mark.parametrize(
    ("slots", "nodes", "holders", "after"),
    [
        ((0, 1), [A], {0: "x", 1: "x"}, {"x": (0, 1)}),
        ((0, 1), [B], {0: "x", 1: "x"}, {"x": (2, 3)}),
        ((0,), [B], {0: "x", 2: "y"}, {"x": (3,)}),
        ((0, 1), [B], {0: "x", 1: "x", 2: "y", 3: "z"}, {"x": (2, 3), "y": (0,), "z": (1,)}),
        ((0, 1), [A, B], {0: "x", 1: "x", 2: "y"}, {"x": (0, 3)}),
        ((0, 2), [B, A], {0: "x", 2: "x"}, {"x": (0, 2)}),
    ],
)
def test_the_engine_chose_other_machines(
    slots: tuple[int, ...], nodes: list[Node], holders: dict[int, str], after: dict[str, tuple[int, ...]]
) -> None:
    assert moved("x", slots, nodes, holders) == after


def test_numbers_of_slots_stay() -> None:
    first = numbered([], [Node("a", 2), Node("b", 1)])
    assert [(node.name, node.first, node.up) for node in first] == [("a", 0, True), ("b", 2, True)]
    second = numbered(first, [Node("b", 1), Node("c", 4)])  # a is gone
    assert [(node.name, node.first, node.up) for node in second] == [("a", 0, False), ("b", 2, True), ("c", 3, True)]
    third = numbered(second, [Node("a", 3), Node("b", 1, up=False), Node("c", 2)])  # a is back and larger
    assert [(node.name, node.first, node.slots) for node in third] == [("a", 7, 3), ("b", 2, 1), ("c", 3, 2)]
    assert [node.pools for node in second] == [(), ("default",), ("default",)]  # what is gone counts for no pool
    taken = [number for node in third for number in node.numbers]
    assert len(taken) == len(set(taken)) and not third[1].up
