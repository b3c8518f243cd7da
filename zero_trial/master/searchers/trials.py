"""The trials that a search has asked for: which still run, which it has told to stop, and how the others ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zero_trial.errors import ZeroTrialError
from zero_trial.master.searchers.actions import ExitReason

RUNNING = "running"
STOPPING = "stopping"
_OPEN = (RUNNING, STOPPING)


@dataclass
class Trials:
    """``states``: by request id, in the order of creation, ``running``, ``stopping`` or the value of an ExitReason."""

    states: dict[str, str] = field(default_factory=dict)

    def is_running(self, request_id: str) -> bool:
        """Neither over nor told to stop."""
        return self._state(request_id) == RUNNING

    def is_open(self, request_id: str) -> bool:
        return self._state(request_id) in _OPEN

    def any_open(self) -> bool:
        return any(state in _OPEN for state in self.states.values())

    def create(self, request_id: str) -> None:
        self.states[request_id] = RUNNING

    def stop(self, request_id: str) -> None:
        self.states[request_id] = STOPPING

    def close(self, request_id: str, reason: ExitReason) -> None:
        self.states[request_id] = reason.value

    def count(self, *reasons: ExitReason) -> int:
        values = {reason.value for reason in reasons}
        return sum(state in values for state in self.states.values())

    @property
    def created(self) -> int:
        return len(self.states)

    def invalid_in_a_row(self) -> int:
        """How many of the trials that are over, counted from the youngest, had invalid hyperparameters and nothing else."""
        number = 0
        for state in reversed(self.states.values()):
            if state in _OPEN:
                continue
            if state != ExitReason.INVALID_HP.value:
                break
            number += 1
        return number

    def units_done(self, fractions: Mapping[str, float], *, without_invalid: bool) -> float:
        """Trials' worth of work done: 1 for each that is over, its own fraction for each that runs."""
        done = 0.0
        for request_id, state in self.states.items():
            if state in _OPEN:
                done += min(max(fractions.get(request_id, 0.0), 0.0), 1.0)
            elif not (without_invalid and state == ExitReason.INVALID_HP.value):
                done += 1.0
        return done

    def _state(self, request_id: str) -> str:
        try:
            return self.states[request_id]
        except KeyError:
            raise ZeroTrialError("not a trial of this search", where=f"request id {request_id}") from None
