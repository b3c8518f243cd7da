"""The life of an experiment: paused, active, stopping and its end, as a pure function of events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zero_trial.master.records import ExperimentState


@dataclass(frozen=True)
class Activate:
    """Its user wants it to run."""


@dataclass(frozen=True)
class Pause:
    """Its user wants it to wait."""


@dataclass(frozen=True)
class Cancel:
    """Its user wants it to stop, trials saving what they have."""


@dataclass(frozen=True)
class Kill:
    """Its user wants it to end now."""


@dataclass(frozen=True)
class SearchOver:
    """The search has ended; ``failed``: no trial came to anything."""

    failed: bool


@dataclass(frozen=True)
class Settled:
    """No trial of it is left that has not ended."""


Event: TypeAlias = Activate | Pause | Cancel | Kill | SearchOver | Settled


class Effect(Enum):
    """What the caller has to do to all trials, or to the experiment itself."""

    START_TRIALS = "start_trials"
    PAUSE_TRIALS = "pause_trials"
    CANCEL_TRIALS = "cancel_trials"
    KILL_TRIALS = "kill_trials"
    END = "end"  # it is over: its checkpoints are looked through


_FORCE = {
    ExperimentState.STOPPING_COMPLETED: 1,
    ExperimentState.STOPPING_ERROR: 1,
    ExperimentState.STOPPING_CANCELED: 2,
    ExperimentState.STOPPING_KILLED: 3,
}
_ENDS = {
    ExperimentState.STOPPING_COMPLETED: ExperimentState.COMPLETED,
    ExperimentState.STOPPING_ERROR: ExperimentState.ERROR,
    ExperimentState.STOPPING_CANCELED: ExperimentState.CANCELED,
    ExperimentState.STOPPING_KILLED: ExperimentState.CANCELED,
}

Outcome: TypeAlias = tuple[ExperimentState, tuple[Effect, ...]]


def step(state: ExperimentState, event: Event) -> Outcome:
    """What the event makes of the experiment. An event that means nothing now changes nothing."""
    if state.final:
        return state, ()
    match event:
        case Activate() if state is ExperimentState.PAUSED:
            return ExperimentState.ACTIVE, (Effect.START_TRIALS,)
        case Pause() if state is ExperimentState.ACTIVE:
            return ExperimentState.PAUSED, (Effect.PAUSE_TRIALS,)
        case Cancel():
            return _stop(state, ExperimentState.STOPPING_CANCELED, (Effect.CANCEL_TRIALS,))
        case Kill():
            return _stop(state, ExperimentState.STOPPING_KILLED, (Effect.KILL_TRIALS,))
        case SearchOver(failed):
            target = ExperimentState.STOPPING_ERROR if failed else ExperimentState.STOPPING_COMPLETED
            return _stop(state, target, ())
        case Settled() if state.stopping:
            return _ENDS[state], (Effect.END,)
    return state, ()


def _stop(state: ExperimentState, target: ExperimentState, effects: tuple[Effect, ...]) -> Outcome:
    """Go towards an end; a gentle wish does not soften a hard one."""
    if state.stopping and _FORCE[state] >= _FORCE[target]:
        return state, ()
    return target, effects
