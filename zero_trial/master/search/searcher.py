"""A search as a state machine: events about trials go in, actions come out; its whole state is a
JSON value between events.

This file is what all searchers (`searchers`) share: first the random numbers, from which each trial
gets its hyperparameters, request id and seed. `Stream` draws what a Determined 0.38.1 master draws
from the same seed.
"""

from __future__ import annotations

import abc
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias

from zero_trial.errors import ZeroTrialError
from zero_trial.experiment.space import sample

TrialDraw: TypeAlias = tuple[str, Mapping[str, Any], int]
"""Request id, hyperparameters and seed of a trial."""

_SEEDS = 2**31  # of trials: 0 to 2^31 - 1


class Draws(Protocol):
    """What a search draws, trial by trial, in the order of their creation."""

    def trial(self, space: Mapping[str, Any], hparams: Mapping[str, Any] | None = None) -> TrialDraw:
        """Draw the next trial: a sample of ``space``, unless ``hparams`` are given."""

    def as_json(self) -> dict[str, Any]:
        """Return the state, for `restored`."""


class Stream:
    """One Mersenne Twister for all trials of a search, as in Determined.

    A trial draws its hyperparameters, then 16 bytes of request id, then its seed. numpy's
    ``RandomState(seed)`` is seeded in the same way and gives the same integers and doubles.

    The state is the seed and the number of 32-bit words that were taken: 64 KB per 16 384 words
    are drawn again when a search is restored.
    """

    def __init__(self, seed: int, words: int = 0) -> None:
        key = [seed % 2**32]
        for number in range(1, 624):
            key.append((1812433253 * (key[-1] ^ key[-1] >> 30) + number) % 2**32)
        self._twister = random.Random()
        self._twister.setstate((3, (*key, 624), None))
        if words:
            self._twister.getrandbits(32 * words)
        self._seed, self._words = seed, words

    def trial(self, space: Mapping[str, Any], hparams: Mapping[str, Any] | None = None) -> TrialDraw:
        drawn = sample(space, self) if hparams is None else hparams
        name = b"".join(self._word().to_bytes(4, "little") for _ in range(4))
        return str(uuid.UUID(bytes=name, version=4)), drawn, self.below(_SEEDS)

    def as_json(self) -> dict[str, Any]:
        return {"seed": self._seed, "words": self._words}

    def below(self, count: int) -> int:
        """Return an integer, 0 to count - 1: the lowest bits of a draw, again while it is too
        large; nothing is drawn for a count of 1.
        """
        bits = (count - 1).bit_length()
        while bits:
            drawn = self._word() if bits <= 32 else self._word() << 32 | self._word()
            drawn %= 1 << bits
            if drawn < count:
                return drawn
        return 0

    def unit(self) -> float:
        """Return a number from 0 to below 1: 27 bits of one word and 26 of the next."""
        return ((self._word() >> 5) * 2.0**26 + (self._word() >> 6)) / 2.0**53

    def _word(self) -> int:
        self._words += 1
        return self._twister.getrandbits(32)


def restored(state: Mapping[str, Any], *, from_start: bool = False) -> Stream:
    """Return the draws of a search in the state of ``as_json``; ``from_start``: begin with the
    first trial again.
    """
    return Stream(int(state["seed"]), 0 if from_start else int(state["words"]))


class ExitReason(str, Enum):
    """The reason why a trial is over, as its searcher gets it.

    A trial whose hyperparameters cannot be trained is COMPLETED, as on Determined's master, which
    never tells its searcher of them: it counts, and nothing replaces it.
    """

    COMPLETED = "completed"  # it came to its end, or was stopped by the searcher
    ERRORED = "errored"  # it failed and has no restarts left
    CANCELED = "canceled"  # its user ended it


@dataclass(frozen=True)
class Create:
    """Start a trial with this seed; the searcher calls it ``request_id`` from now on."""

    request_id: str
    hparams: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Stop:
    """End a trial for good, with a checkpoint; its exit is reported as COMPLETED. ``finished``: it
    has trained to its end."""

    request_id: str
    finished: bool = False


@dataclass(frozen=True)
class Shutdown:
    """The search is over; how its trials ended decides how the experiment does."""


Action: TypeAlias = Create | Stop | Shutdown


@dataclass(frozen=True)
class PlannedTrials:
    """``count`` trials that train for ``units`` of ``unit``; to their end if ``units`` is None."""

    count: int
    units: int | None = None
    unit: str = ""


RUNNING = "running"
STOPPING = "stopping"
_OPEN = (RUNNING, STOPPING)


@dataclass
class SearchTrials:
    """The trials of a search and their states.

    ``states`` maps request ids, in the order of creation, to ``running``, ``stopping`` or the value
    of an ExitReason.
    """

    states: dict[str, str] = field(default_factory=dict)

    def is_running(self, request_id: str) -> bool:
        """Return whether a trial is neither over nor asked to stop."""
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

    @property
    def created(self) -> int:
        return len(self.states)

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return how far the trials created so far are on average: 1 for each that is over."""
        shares = [
            min(max(fractions.get(request_id, 0.0), 0.0), 1.0) if state in _OPEN else 1.0
            for request_id, state in self.states.items()
        ]
        return sum(shares) / max(len(shares), 1)

    def _state(self, request_id: str) -> str:
        try:
            return self.states[request_id]
        except KeyError:
            raise ZeroTrialError("not a trial of this search", where=f"request id {request_id}") from None


class MetricMissing(ZeroTrialError):
    """A validation lacks the searcher's metric; the state of the searcher is unchanged."""


class Searcher(abc.ABC):
    """Decides one experiment's search. Not thread-safe.

    Pure: no clock, no files; the same events give the same actions. Events about a trial that is
    over, and any event after Shutdown, change nothing. An unknown request id is a ZeroTrialError.
    """

    kind: ClassVar[str]

    def __init__(self, space: Mapping[str, Any], draws: Draws) -> None:
        self.space = space
        self.draws = draws
        self.trials = SearchTrials()
        self.over = False

    def start(self) -> list[Action]:
        """Return the first actions. Called once, before any event."""
        return self._ended_if_empty(self._first())

    def on_validation(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        """Handle the validation ``metrics`` of a trial.

        Raises MetricMissing if the search cannot go on with this trial: the caller fails the trial
        and calls ``on_exited(request_id, ExitReason.ERRORED)`` after its end.
        """
        if self.over or not self.trials.is_running(request_id):
            return []
        return self._validated(request_id, metrics)

    def on_exited(self, request_id: str, reason: ExitReason) -> list[Action]:
        """Handle the end of a trial. Called once per trial, also after a Stop (COMPLETED)."""
        if self.over or not self.trials.is_open(request_id):
            return []
        was_stopping = not self.trials.is_running(request_id)
        self.trials.close(request_id, reason)
        return self._ended_if_empty(self._exited(request_id, reason, was_stopping))

    def progress(self, fractions: Mapping[str, float]) -> float:
        """Return how far the search is, 0 to 1, as Determined computes it. It can fall when trials
        are created.

        Args:
            fractions: how far each running trial is, 0 to 1, by request id.
        """
        return 1.0 if self.over else min(max(self._progress(fractions), 0.0), 1.0)

    @abc.abstractmethod
    def preview(self) -> list[PlannedTrials]:
        """Return how many trials train how long if each rung stops as many as it should, shortest
        first.
        """

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as a JSON value, the draws included, for ``restore``."""
        return {
            "kind": self.kind,
            "draws": self.draws.as_json(),
            "trials": dict(self.trials.states),
            "over": self.over,
            **self._own_state(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take the state of ``snapshot``; its draws are those that this searcher was built with.
        Raises ZeroTrialError for another searcher's.
        """
        if snapshot.get("kind") != self.kind:
            raise ZeroTrialError(
                "the snapshot belongs to another searcher", got=snapshot.get("kind"), expected=self.kind
            )
        self.trials = SearchTrials(dict(snapshot["trials"]))
        self.over = snapshot["over"]
        self._restore_own(snapshot)

    @classmethod
    @abc.abstractmethod
    def of(cls, section: Mapping[str, Any], space: Mapping[str, Any], draws: Draws) -> Searcher:
        """Build the searcher of a completed config.

        Args:
            section: the config's ``searcher``.
            space: the config's ``hyperparameters``.
            draws: what its trials draw.
        """

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

    def _restore_own(self, snapshot: Mapping[str, Any]) -> None:
        return None

    def _create(self, hparams: Mapping[str, Any] | None = None) -> Create:
        """Create a trial, of a sample unless ``hparams`` are given."""
        request_id, drawn, seed = self.draws.trial(self.space, hparams)
        self.trials.create(request_id)
        return Create(request_id, drawn, seed)

    def _stop(self, request_id: str, *, finished: bool) -> Stop:
        self.trials.stop(request_id)
        return Stop(request_id, finished)

    def _ended_if_empty(self, actions: list[Action]) -> list[Action]:
        """Return ``actions``, followed by a Shutdown if no trial is left."""
        if self.trials.any_open():
            return actions
        self.over = True
        return [*actions, Shutdown()]


def option(section: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a key of the ``searcher`` section; ``default`` if it is missing or null."""
    value = section.get(name)
    return default if value is None else value


def max_concurrent(section: Mapping[str, Any]) -> int:
    """Return ``max_concurrent_trials``, by default 16; 0 means all at once."""
    return int(option(section, "max_concurrent_trials", 16))
