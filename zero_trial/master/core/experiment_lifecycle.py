"""The life of an experiment: paused, active, stopping and its end, as a pure function of events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from zero_trial.master.records import ExperimentState


@dataclass(frozen=True)
class ActivateExperiment:
    """Its user wants it to run."""


@dataclass(frozen=True)
class PauseExperiment:
    """Its user wants it to wait."""


@dataclass(frozen=True)
class CancelExperiment:
    """Its user wants it to stop, trials saving what they have."""


@dataclass(frozen=True)
class KillExperiment:
    """Its user wants it to end now."""


@dataclass(frozen=True)
class SearchOver:
    """The search has ended; ``failed``: no trial came to anything."""

    failed: bool


@dataclass(frozen=True)
class Settled:
    """No trial of it is left that has not ended."""


ExperimentEvent: TypeAlias = (
    ActivateExperiment | PauseExperiment | CancelExperiment | KillExperiment | SearchOver | Settled
)


class ExperimentEffect(Enum):
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

Outcome: TypeAlias = tuple[ExperimentState, tuple[ExperimentEffect, ...]]


def step(state: ExperimentState, event: ExperimentEvent) -> Outcome:
    """What the event makes of the experiment. An event that means nothing now changes nothing."""
    if state.final:
        return state, ()
    match event:
        case ActivateExperiment() if state is ExperimentState.PAUSED:
            return ExperimentState.ACTIVE, (ExperimentEffect.START_TRIALS,)
        case PauseExperiment() if state is ExperimentState.ACTIVE:
            return ExperimentState.PAUSED, (ExperimentEffect.PAUSE_TRIALS,)
        case CancelExperiment():
            return _stop(state, ExperimentState.STOPPING_CANCELED, (ExperimentEffect.CANCEL_TRIALS,))
        case KillExperiment():
            return _stop(state, ExperimentState.STOPPING_KILLED, (ExperimentEffect.KILL_TRIALS,))
        case SearchOver(failed):
            target = ExperimentState.STOPPING_ERROR if failed else ExperimentState.STOPPING_COMPLETED
            return _stop(state, target, ())
        case Settled() if state.stopping:
            return _ENDS[state], (ExperimentEffect.END,)
    return state, ()


def _stop(state: ExperimentState, target: ExperimentState, effects: tuple[ExperimentEffect, ...]) -> Outcome:
    """Go towards an end; a gentle wish does not soften a hard one."""
    if state.stopping and _FORCE[state] >= _FORCE[target]:
        return state, ()
    return target, effects
