"""A search as a state machine: events about trials in, actions out, its whole state a JSON value between events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_trial.errors import ZeroTrialError
from zero_trial.master.searchers.actions import Action, ExitReason


class MetricMissing(ZeroTrialError):
    """A validation without the number that the search goes by; the searcher's state is as before."""


class Searcher:
    """One experiment's search. Pure: no clock, no files; the same events give the same actions. Not thread-safe."""

    def start(self) -> list[Action]:
        """The first actions. Called once, before any event."""
        raise NotImplementedError

    def on_validation(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        """A trial has reported validation ``metrics``. Raises MetricMissing where the search cannot go on with this trial: the caller ends
        the trial as failed, and says ``on_exited(request_id, ExitReason.ERRORED)`` when it is gone.
        """
        raise NotImplementedError

    def on_exited(self, request_id: str, reason: ExitReason) -> list[Action]:
        """A trial is over. Said once per trial, also after a Stop (COMPLETED)."""
        raise NotImplementedError

    def progress(self, fractions: Mapping[str, float]) -> float:
        """How far the whole search is, 0 to 1; ``fractions`` is how far each running trial says it is, by request id."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, Any]:
        """The whole state as a JSON value, random stream included, for ``restore``."""
        raise NotImplementedError
