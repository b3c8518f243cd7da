"""Who gets which slots."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zero_trial.master.scheduler import SlotAssignment, Waiting, in_order, place


def wait(name: str, experiment: int = 1, slots: int = 1, priority: int = 42, max_slots: int | None = None) -> Waiting:
    return Waiting(name, experiment, slots, priority, (experiment, int(name[1:] or 0)), max_slots)


def placed(*queue: Waiting, free: list[int], used: dict[int, int] | None = None) -> dict[str, tuple[int, ...]]:
    return {item.allocation_id: item.slots for item in place(queue, free, used or {})}


def test_first_come_first_served_with_the_lowest_slots() -> None:
    assert place([wait("t1", slots=2), wait("t2")], [3, 0, 1], {}) == [
        SlotAssignment("t1", (0, 1)),
        SlotAssignment("t2", (3,)),
    ]


def test_lower_priority_numbers_go_first() -> None:
    assert placed(wait("t1", 1, priority=42), wait("t2", 2, priority=1), free=[0]) == {"t2": (0,)}


def test_all_slots_or_none() -> None:
    assert placed(wait("t1", slots=3), free=[0, 1]) == {}


def test_a_big_one_is_not_starved_by_small_ones() -> None:
    assert placed(wait("t1", slots=2), wait("t2"), free=[0]) == {}


def test_max_slots_bounds_an_experiment_and_holds_back_nobody_else() -> None:
    queue = [wait("t1", 1, max_slots=1), wait("t2", 1, max_slots=1), wait("t3", 2)]
    assert placed(*queue, free=[0, 1]) == {"t1": (0,), "t3": (1,)}
    assert placed(*queue, free=[0, 1], used={1: 1}) == {"t3": (0,)}


def test_one_without_slots_always_runs() -> None:
    assert placed(wait("t1", slots=2), wait("t2", slots=0), free=[]) == {"t2": ()}


def test_the_order_is_priority_then_submission() -> None:
    queue = [wait("t3", 3), wait("t2", 2, priority=50), wait("t1", 1)]
    assert [item.allocation_id for item in in_order(queue)] == ["t1", "t3", "t2"]


QUEUES = st.lists(
    st.builds(
        lambda number, experiment, slots, priority, limit: wait(f"t{number}", experiment, slots, priority, limit),
        st.integers(0, 99),
        st.integers(1, 4),
        st.integers(0, 4),
        st.integers(1, 3),
        st.none() | st.integers(0, 4),
    ),
    max_size=8,
    unique_by=lambda item: item.allocation_id,
)


@given(queue=QUEUES, free=st.sets(st.integers(0, 7)))
def test_nothing_is_given_out_twice_and_no_limit_is_passed(queue: list[Waiting], free: set[int]) -> None:
    made = place(queue, sorted(free), {})
    given_out = [slot for item in made for slot in item.slots]
    assert len(given_out) == len(set(given_out)) and set(given_out) <= free
    by_name: dict[str, Any] = {item.allocation_id: item for item in queue}
    for item in made:
        assert len(item.slots) == by_name[item.allocation_id].slots
    for experiment in {item.experiment_id for item in queue}:
        own = [by_name[item.allocation_id] for item in made if by_name[item.allocation_id].experiment_id == experiment]
        limits = [item.max_slots for item in own if item.max_slots is not None and item.slots]
        assert (
            not limits or sum(item.slots for item in own) <= max(limits) or any(item.max_slots is None for item in own)
        )
