"""The lives of trials and experiments as pure functions: (state, event) -> (state, effects).

A trial has at most one run at a time::

    NONE --Activate/start--> QUEUED --Placed--> RUNNING --Exited--> NONE (paused), QUEUED (again) or the end

What an exit means depends on what was asked before it::

    stopping                    the end that was asked for
    the trial said why          that end (invalid hyperparameters ...)
    killed, by us or from outside (overdue, the master or the machine goes down)
                                as if it had saved: it goes on from its last checkpoint, no restart is counted
    exit 0, not acknowledged    COMPLETED
    exit 0, acknowledged        paused: stays paused; active: queued again
    exit != 0                   a restart while restarts <= max_restarts, else ERROR
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from zero_trial.master.records import ExperimentState, TrialState
from zero_trial.master.search.searcher import ExitReason


class RunStage(Enum):
    """Whether the trial has an allocation, and how far it is."""

    NONE = "none"
    QUEUED = "queued"
    RUNNING = "running"  # its processes were ordered; they may have ended unseen


@dataclass(frozen=True)
class TrialLife:
    """All of a trial that decides what happens next."""

    state: TrialState = TrialState.ACTIVE
    run: RunStage = RunStage.NONE
    restarts: int = 0
    max_restarts: int = 5
    preempting: bool = False  # this run was asked to stop
    acked: bool = False  # and said that it will
    killing: bool = False  # this run is being ended by force
    early_exit: str = ""  # why the trial said that it ends
    reason: str = ""  # why it ended, for people


@dataclass(frozen=True)
class StartTrial:
    """The trial was created in an active experiment, or its experiment goes on."""


@dataclass(frozen=True)
class PauseTrial:
    """Its experiment is paused."""


@dataclass(frozen=True)
class CancelTrial:
    """Its user wants it to stop at its next chance."""


@dataclass(frozen=True)
class KillTrial:
    """Its user wants it to end now."""


@dataclass(frozen=True)
class StopBySearch:
    """The search has seen enough of it."""


@dataclass(frozen=True)
class Fail:
    """It cannot go on."""

    reason: str


@dataclass(frozen=True)
class Placed:
    """Its run was given slots."""


@dataclass(frozen=True)
class Acked:
    """Its run says that it ends because it was asked to."""


@dataclass(frozen=True)
class EarlyExit:
    """Its run says that it ends, and why."""

    reason: str


@dataclass(frozen=True)
class Overdue:
    """Its run should have ended by now."""


@dataclass(frozen=True)
class Exited:
    """Its run is over. ``why`` describes an exit that is no exit code; ``killed``: its shepherd was asked to end it, by whomever."""

    code: int
    why: str = ""
    killed: bool = False


TrialEvent: TypeAlias = (
    StartTrial
    | PauseTrial
    | CancelTrial
    | KillTrial
    | StopBySearch
    | Fail
    | Placed
    | Acked
    | EarlyExit
    | Overdue
    | Exited
)


class TrialEffect(Enum):
    """What the caller has to do, in this order."""

    REQUEST = "request"  # put a new run into the queue
    WITHDRAW = "withdraw"  # take the queued run out of it
    PREEMPT = "preempt"  # ask the run to stop, and start the clock of preemption_timeout
    KILL = "kill"  # end the run's processes
    WATCH = "watch"  # the run says that it ends: give it a short time
    END = "end"  # the trial is over: tell the search


INVALID_HP = "INVALID_HP"
"""The early exit that a search forgives."""

_TRIAL_FORCE = {
    TrialState.STOPPING_COMPLETED: 1,
    TrialState.STOPPING_CANCELED: 2,
    TrialState.STOPPING_ERROR: 3,
    TrialState.STOPPING_KILLED: 3,
}
_TRIAL_ENDS = {
    TrialState.STOPPING_COMPLETED: TrialState.COMPLETED,
    TrialState.STOPPING_CANCELED: TrialState.CANCELED,
    TrialState.STOPPING_KILLED: TrialState.CANCELED,
    TrialState.STOPPING_ERROR: TrialState.ERROR,
}

TrialOutcome: TypeAlias = tuple[TrialLife, tuple[TrialEffect, ...]]


def step_trial(life: TrialLife, event: TrialEvent) -> TrialOutcome:
    """What the event makes of the trial, and what is to be done. An event that means nothing now changes nothing."""
    if life.state.final:
        return life, ()
    match event:
        case StartTrial():
            return _start(life)
        case PauseTrial():
            return _pause(life)
        case CancelTrial():
            return _stop_trial(life, TrialState.STOPPING_CANCELED, "canceled by its user")
        case KillTrial():
            return _stop_trial(life, TrialState.STOPPING_KILLED, "killed by its user")
        case StopBySearch():
            return _stop_trial(life, TrialState.STOPPING_COMPLETED, "stopped by the search")
        case Fail(reason):
            return _stop_trial(life, TrialState.STOPPING_ERROR, reason)
        case Placed():
            return (replace(life, run=RunStage.RUNNING), ()) if life.run is RunStage.QUEUED else (life, ())
        case Acked():
            return (replace(life, acked=True), ()) if life.run is RunStage.RUNNING and life.preempting else (life, ())
        case EarlyExit(reason):
            return (
                (replace(life, early_exit=reason), (TrialEffect.WATCH,)) if life.run is RunStage.RUNNING else (life, ())
            )
        case Overdue():
            return _kill(life) if life.run is RunStage.RUNNING else (life, ())
        case Exited():
            return _exited(life, event) if life.run is RunStage.RUNNING else (life, ())


def exit_reason(life: TrialLife) -> ExitReason:
    """What the search is told of a trial that has ended."""
    if life.early_exit == INVALID_HP:
        return ExitReason.INVALID_HP
    return {
        TrialState.COMPLETED: ExitReason.COMPLETED,
        TrialState.CANCELED: ExitReason.CANCELED,
    }.get(life.state, ExitReason.ERRORED)


def _start(life: TrialLife) -> TrialOutcome:
    if life.state.stopping:
        return life, ()
    life = replace(life, state=TrialState.ACTIVE)
    if life.run is RunStage.NONE:
        return replace(life, run=RunStage.QUEUED), (TrialEffect.REQUEST,)
    return life, ()


def _pause(life: TrialLife) -> TrialOutcome:
    if life.state is not TrialState.ACTIVE:
        return life, ()
    life = replace(life, state=TrialState.PAUSED)
    if life.run is RunStage.QUEUED:
        return replace(life, run=RunStage.NONE), (TrialEffect.WITHDRAW,)
    return _preempt(life)


def _preempt(life: TrialLife) -> TrialOutcome:
    if life.run is not RunStage.RUNNING or life.preempting or life.killing:
        return life, ()
    return replace(life, preempting=True), (TrialEffect.PREEMPT,)


def _kill(life: TrialLife) -> TrialOutcome:
    if life.run is not RunStage.RUNNING or life.killing:
        return life, ()
    return replace(life, killing=True), (TrialEffect.KILL,)


def _stop_trial(life: TrialLife, target: TrialState, reason: str) -> TrialOutcome:
    """Go towards an end; a gentle wish does not soften a hard one."""
    if life.state.stopping and _TRIAL_FORCE[life.state] >= _TRIAL_FORCE[target]:
        return life, ()
    life = replace(life, state=target, reason=reason)
    if life.run is RunStage.RUNNING:
        hard = target in (TrialState.STOPPING_KILLED, TrialState.STOPPING_ERROR)
        return _kill(life) if hard else _preempt(life)
    withdraw = (TrialEffect.WITHDRAW,) if life.run is RunStage.QUEUED else ()
    ended = replace(life, state=_TRIAL_ENDS[target], run=RunStage.NONE)
    return ended, (*withdraw, TrialEffect.END)


def _exited(life: TrialLife, event: Exited) -> TrialOutcome:
    over = replace(life, run=RunStage.NONE, preempting=False, acked=False, killing=False)
    if life.state.stopping:
        return _end(over, _TRIAL_ENDS[life.state], life.reason)
    if life.early_exit:
        return _end(over, TrialState.ERROR, f"the trial ended itself: {life.early_exit}")
    if life.killing or event.killed or (event.code == 0 and life.acked):
        return _again(over)
    if event.code == 0:
        return _end(over, TrialState.COMPLETED, "")
    over = replace(over, restarts=life.restarts + 1)
    if over.restarts > life.max_restarts:
        what = event.why or f"exit code {event.code}"
        return _end(
            replace(over, restarts=life.restarts), TrialState.ERROR, f"{what}; max_restarts is {life.max_restarts}"
        )
    return _again(over)


def _again(life: TrialLife) -> TrialOutcome:
    """Another run, unless the trial is paused."""
    if life.state is TrialState.PAUSED:
        return life, ()
    return replace(life, run=RunStage.QUEUED), (TrialEffect.REQUEST,)


def _end(life: TrialLife, state: TrialState, reason: str) -> TrialOutcome:
    return replace(life, state=state, reason=reason), (TrialEffect.END,)


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


_EXPERIMENT_FORCE = {
    ExperimentState.STOPPING_COMPLETED: 1,
    ExperimentState.STOPPING_ERROR: 1,
    ExperimentState.STOPPING_CANCELED: 2,
    ExperimentState.STOPPING_KILLED: 3,
}
_EXPERIMENT_ENDS = {
    ExperimentState.STOPPING_COMPLETED: ExperimentState.COMPLETED,
    ExperimentState.STOPPING_ERROR: ExperimentState.ERROR,
    ExperimentState.STOPPING_CANCELED: ExperimentState.CANCELED,
    ExperimentState.STOPPING_KILLED: ExperimentState.CANCELED,
}

ExperimentOutcome: TypeAlias = tuple[ExperimentState, tuple[ExperimentEffect, ...]]


def step_experiment(state: ExperimentState, event: ExperimentEvent) -> ExperimentOutcome:
    """What the event makes of the experiment. An event that means nothing now changes nothing."""
    if state.final:
        return state, ()
    match event:
        case ActivateExperiment() if state is ExperimentState.PAUSED:
            return ExperimentState.ACTIVE, (ExperimentEffect.START_TRIALS,)
        case PauseExperiment() if state is ExperimentState.ACTIVE:
            return ExperimentState.PAUSED, (ExperimentEffect.PAUSE_TRIALS,)
        case CancelExperiment():
            return _stop_experiment(state, ExperimentState.STOPPING_CANCELED, (ExperimentEffect.CANCEL_TRIALS,))
        case KillExperiment():
            return _stop_experiment(state, ExperimentState.STOPPING_KILLED, (ExperimentEffect.KILL_TRIALS,))
        case SearchOver(failed):
            target = ExperimentState.STOPPING_ERROR if failed else ExperimentState.STOPPING_COMPLETED
            return _stop_experiment(state, target, ())
        case Settled() if state.stopping:
            return _EXPERIMENT_ENDS[state], (ExperimentEffect.END,)
    return state, ()


def _stop_experiment(
    state: ExperimentState, target: ExperimentState, effects: tuple[ExperimentEffect, ...]
) -> ExperimentOutcome:
    """Go towards an end; a gentle wish does not soften a hard one."""
    if state.stopping and _EXPERIMENT_FORCE[state] >= _EXPERIMENT_FORCE[target]:
        return state, ()
    return target, effects
