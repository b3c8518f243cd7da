"""Who watches the phases of a micro-batch: forward, backward, reduce wait, step.

The engine calls :meth:`Phases.begin` and :meth:`Phases.end`; the base class is the null object for a run that watches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

FORWARD, BACKWARD, REDUCE_WAIT, STEP = "forward", "backward", "reduce wait", "step"


class Phases:
    """Watches nothing."""

    def begin(self, phase: str) -> None:
        """``phase`` starts. A phase that an exception cut short is simply begun again."""

    def end(self, phase: str) -> None:
        """``phase`` has ended."""


class PhaseGroup(Phases):
    """Several watchers; the last begins last and ends first, so that it sees the least of the others."""

    def __init__(self, members: Sequence[Phases]) -> None:
        self._members = tuple(members)

    def begin(self, phase: str) -> None:
        for member in self._members:
            member.begin(phase)

    def end(self, phase: str) -> None:
        for member in reversed(self._members):
            member.end(phase)


def watch_with(members: Sequence[Phases]) -> Phases:
    """One object for all ``members``: the null object for none, the member itself for one."""
    if len(members) == 1:
        return members[0]
    return PhaseGroup(members) if members else Phases()
