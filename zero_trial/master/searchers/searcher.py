"""A search as a state machine: events about trials in, actions out, its whole state a JSON value between events."""

from __future__ import annotations

import abc
import random
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from zero_trial.errors import ZeroTrialError
from zero_trial.master.searchers.actions import Action, Create, ExitReason, Shutdown, Stop
from zero_trial.master.searchers.draws import Draws
from zero_trial.master.searchers.sampling import has_ranges, sample
from zero_trial.master.searchers.trials import Trials

MOST_INVALID_IN_A_ROW = 100
"""After so many samples without one that can be trained, no more are tried: a space with nothing valid in it would be searched for ever."""


class MetricMissing(ZeroTrialError):
    """A validation without the number that the search goes by; the searcher's state is as before."""


class Searcher(abc.ABC):
    """One experiment's search. Pure: no clock, no files; the same events give the same actions. Not thread-safe.

    Events about a trial that is over, and any event after Shutdown, change nothing. An unknown request id is a ZeroTrialError.
    """

    kind: ClassVar[str]

    def __init__(self, space: Mapping[str, Any], draws: Draws) -> None:
        self.space = space
        self.draws = draws
        self.trials = Trials()
        self.over = False

    def start(self) -> list[Action]:
        """The first actions. Called once, before any event."""
        return self._ended_if_empty(self._first())

    def on_validation(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        """A trial has reported validation ``metrics``. Raises MetricMissing where the search cannot go on with this trial: the caller ends
        the trial as failed, and says ``on_exited(request_id, ExitReason.ERRORED)`` when it is gone.
        """
        if self.over or not self.trials.is_running(request_id):
            return []
        return self._validated(request_id, metrics)

    def on_exited(self, request_id: str, reason: ExitReason) -> list[Action]:
        """A trial is over. Said once per trial, also after a Stop (COMPLETED)."""
        if self.over or not self.trials.is_open(request_id):
            return []
        was_stopping = not self.trials.is_running(request_id)
        self.trials.close(request_id, reason)
        return self._ended_if_empty(self._exited(request_id, reason, was_stopping))

    def progress(self, fractions: Mapping[str, float]) -> float:
        """How far the whole search is, 0 to 1; ``fractions`` is how far each running trial says it is, by request id."""
        return 1.0 if self.over else min(max(self._progress(fractions), 0.0), 1.0)

    def snapshot(self) -> dict[str, Any]:
        """The whole state as a JSON value, random stream included, for ``restore``."""
        return {
            "kind": self.kind,
            "draws": self.draws.as_json(),
            "trials": dict(self.trials.states),
            "over": self.over,
            **self._own_state(),
        }

    def take(self, snapshot: Mapping[str, Any]) -> None:
        """Become what ``snapshot`` says. Raises ZeroTrialError for that of another kind of search."""
        if snapshot.get("kind") != self.kind:
            raise ZeroTrialError("the snapshot of another searcher", got=snapshot.get("kind"), expected=self.kind)
        self.draws = Draws(**snapshot["draws"])
        self.trials = Trials(dict(snapshot["trials"]))
        self.over = snapshot["over"]
        self._take_own(snapshot)

    @abc.abstractmethod
    def _first(self) -> list[Action]: ...

    @abc.abstractmethod
    def _exited(self, request_id: str, reason: ExitReason, was_stopping: bool) -> list[Action]: ...

    @abc.abstractmethod
    def _progress(self, fractions: Mapping[str, float]) -> float: ...

    def _validated(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        return []

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _take_own(self, snapshot: Mapping[str, Any]) -> None:
        return None

    def _create(self, hparams: Mapping[str, Any] | None = None) -> Create:
        """A new trial, of a sample unless ``hparams`` are given."""
        stream = self.draws.next()
        request_id = str(uuid.UUID(int=stream.getrandbits(128), version=4))
        seed = stream.randrange(2**31)
        self.trials.create(request_id)
        return Create(request_id, self._sample(stream) if hparams is None else hparams, seed)

    def _sample(self, stream: random.Random) -> dict[str, Any]:
        return sample(self.space, stream)

    def _may_replace_invalid(self) -> bool:
        """Whether another sample can be any better than the invalid ones before it."""
        return has_ranges(self.space) and self.trials.invalid_in_a_row() < MOST_INVALID_IN_A_ROW

    def _stop(self, request_id: str) -> Stop:
        self.trials.stop(request_id)
        return Stop(request_id)

    def _ended_if_empty(self, actions: list[Action]) -> list[Action]:
        """``actions``, and a Shutdown behind them once no trial is left. A search in which no trial came to anything has failed."""
        if self.trials.any_open():
            return actions
        self.over = True
        failed = self.trials.count(ExitReason.COMPLETED, ExitReason.CANCELED) == 0
        return [*actions, Shutdown(failed)]
