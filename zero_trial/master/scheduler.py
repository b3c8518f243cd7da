"""Which waiting allocation gets which slots, as a pure function: lower priority numbers first, then who came first, and all slots or none.

Nobody is preempted. One that is first in the queue and does not fit holds back those behind it, so that a big one is never starved by small
ones; one whose experiment has used up its ``max_slots`` holds back nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """A queued allocation; ``order`` is the place in which it came (experiment, then trial)."""

    allocation_id: str
    experiment_id: int
    slots: int
    priority: int
    order: tuple[float, ...]
    max_slots: int | None = None


@dataclass(frozen=True)
class SlotAssignment:
    """Slots for one allocation, lowest numbers first."""

    allocation_id: str
    slots: tuple[int, ...]


def in_order(queue: Iterable[Waiting]) -> list[Waiting]:
    """The queue, first come first."""
    return sorted(queue, key=lambda item: (item.priority, item.order))


def place(queue: Iterable[Waiting], free: Sequence[int], used: Mapping[int, int]) -> list[SlotAssignment]:
    """Placements that can be made now. ``free``: slot numbers; ``used``: slots that each experiment holds."""
    left = sorted(free)
    held = Counter(used)
    made: list[SlotAssignment] = []
    blocked = False
    for item in in_order(queue):
        if item.slots == 0:
            made.append(SlotAssignment(item.allocation_id, ()))
            continue
        if blocked or (item.max_slots is not None and held[item.experiment_id] + item.slots > item.max_slots):
            continue
        if item.slots > len(left):
            blocked = True
            continue
        made.append(SlotAssignment(item.allocation_id, tuple(left[: item.slots])))
        left = left[item.slots :]
        held[item.experiment_id] += item.slots
    return made
