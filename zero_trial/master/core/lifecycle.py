"""The lifecycles of trials and experiments as pure functions, (state, event) -> (state, effects),
and the assignment of slots to queued runs.

A trial has at most one run at a time::

    NONE --StartTrial--> QUEUED --Placed--> RUNNING --Exited--> NONE (paused), QUEUED (again) or
    the end

The result of an exit depends on what was requested before it::

    stopping                    the requested final state
    killed by the master or from outside (overdue, the master or the machine shuts down)
                                as if the trial had saved: it continues from its last checkpoint,
                                and no restart is counted
    exit 0, early exit          COMPLETED for invalid hyperparameters, else ERROR
    exit 0, not acknowledged    COMPLETED
    exit 0, acknowledged        paused: stays paused; active: queued again
    exit != 0                   restart while restarts <= max_restarts and no log policy forbids it,
                                else ERROR
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from zero_trial.master.agent.resources import POOL, fit, shape
from zero_trial.master.records import Allocation, ExperimentState, TrialState
from zero_trial.master.search.searcher import ExitReason


class RunStage(Enum):
    """The stage of a trial's run."""

    NONE = "none"
    QUEUED = "queued"
    RUNNING = "running"  # its start was ordered; the processes may already have ended


@dataclass(frozen=True)
class TrialLife:
    """The part of a trial's state that decides what happens next."""

    state: TrialState = TrialState.ACTIVE
    run: RunStage = RunStage.NONE
    restarts: int = 0
    max_restarts: int = 5
    preempting: bool = False  # this run was asked to stop
    acked: bool = False  # this run has acknowledged the request to stop
    killing: bool = False  # this run is being killed
    waiting: bool = False  # the cluster engine has not started this run: there is nothing to save
    early_exit: str = ""  # the reason that the trial reported for its early exit
    reason: str = ""  # why the trial ended, for display


class TrialSignal(Enum):
    """A trial event without a payload."""

    START = "start"  # the trial was created in an active experiment, or its experiment is activated
    PAUSE = "pause"  # its experiment is paused
    CANCEL = "cancel"  # its user cancels it: stop at the next opportunity
    KILL = "kill"  # its user kills it: end now
    STOP = "stop"  # the search stops it early
    FINISH = "finish"  # the search finishes it: it has trained to its full length
    PLACED = "placed"  # slots were assigned to its run
    ACKED = "acked"  # its run has acknowledged the preemption
    OVERDUE = "overdue"  # its run is past its deadline
    EVICTED = "evicted"  # its run loses its slots: the master shuts down, or a slot is disabled


@dataclass(frozen=True)
class Fail:
    """The trial cannot continue."""

    reason: str


@dataclass(frozen=True)
class EarlyExit:
    """The trial's run has reported that it will exit early, and why."""

    reason: str


@dataclass(frozen=True)
class Exited:
    """The trial's run has ended.

    ``why``: describes an end without an exit code. ``killed``: its supervisor was asked to end it.
    ``no_retry`` and ``excluded``: why log policies forbid another run at all, or on this machine.
    """

    code: int
    why: str = ""
    killed: bool = False
    no_retry: str = ""
    excluded: str = ""


TrialEvent: TypeAlias = TrialSignal | Fail | EarlyExit | Exited


class TrialEffect(Enum):
    """An effect on a trial. The caller carries out the effects in the order listed here."""

    REQUEST = "request"  # queue a new run
    WITHDRAW = "withdraw"  # remove the queued run from the queue
    PREEMPT = "preempt"  # ask the run to stop, and start the timer of preemption_timeout
    KILL = "kill"  # kill the run's processes
    WATCH = "watch"  # the run reported an early exit: set a short deadline for it
    END = "end"  # the trial is over: report its end to the search


STOPPED_BY_SEARCH = "stopped by the search"
INVALID_HP = "INVALID_HP"  # the early exit that completes a trial
_TRIAL_FORCE = {
    TrialState.STOPPING_COMPLETED: 1,
    TrialState.STOPPING_CANCELED: 2,
    TrialState.STOPPING_ERROR: 3,
    TrialState.STOPPING_KILLED: 3,
}
_ENDS = {
    TrialState.STOPPING_COMPLETED: TrialState.COMPLETED,
    TrialState.STOPPING_CANCELED: TrialState.CANCELED,
    TrialState.STOPPING_KILLED: TrialState.CANCELED,
    TrialState.STOPPING_ERROR: TrialState.ERROR,
}

_TrialOutcome: TypeAlias = tuple[TrialLife, tuple[TrialEffect, ...]]


def step_trial(life: TrialLife, event: TrialEvent) -> _TrialOutcome:
    """Return the trial after an event, and the effects. Events that do not apply do nothing."""
    if life.state.final:
        return life, ()
    match event:
        case TrialSignal.START:
            return _start(life)
        case TrialSignal.PAUSE:
            return _pause(life)
        case TrialSignal.CANCEL:
            return _stop_trial(life, TrialState.STOPPING_CANCELED, "canceled by its user")
        case TrialSignal.KILL:
            return _stop_trial(life, TrialState.STOPPING_KILLED, "killed by its user")
        case TrialSignal.STOP:
            return _stop_trial(life, TrialState.STOPPING_COMPLETED, STOPPED_BY_SEARCH)
        case TrialSignal.FINISH:
            return _stop_trial(life, TrialState.STOPPING_COMPLETED, "trained to its end")
        case TrialSignal.PLACED if life.run is RunStage.QUEUED:
            return replace(life, run=RunStage.RUNNING), ()
        case TrialSignal.ACKED if life.run is RunStage.RUNNING and life.preempting:
            return replace(life, acked=True), ()
        case TrialSignal.OVERDUE if life.early_exit == INVALID_HP and life.run is RunStage.RUNNING and not life.killing:
            return _stop_trial(life, TrialState.STOPPING_KILLED, "the trial did not exit after it reported INVALID_HP")
        case TrialSignal.OVERDUE | TrialSignal.EVICTED:
            return _kill(life)
        case Fail(reason):
            return _stop_trial(life, TrialState.STOPPING_ERROR, reason)
        case EarlyExit(reason) if life.run is RunStage.RUNNING:
            return replace(life, early_exit=reason), (TrialEffect.WATCH,)
        case Exited() if life.run is RunStage.RUNNING:
            return _exited(life, event)
    return life, ()


def exit_reason(life: TrialLife) -> ExitReason:
    """Return the exit reason to report to the search for a trial that has ended."""
    known = {TrialState.COMPLETED: ExitReason.COMPLETED, TrialState.CANCELED: ExitReason.CANCELED}
    return known.get(life.state, ExitReason.ERRORED)


def _start(life: TrialLife) -> _TrialOutcome:
    if life.state.stopping:
        return life, ()
    life = replace(life, state=TrialState.ACTIVE)
    if life.run is RunStage.NONE:
        return replace(life, run=RunStage.QUEUED), (TrialEffect.REQUEST,)
    return life, ()


def _pause(life: TrialLife) -> _TrialOutcome:
    if life.state is not TrialState.ACTIVE:
        return life, ()
    life = replace(life, state=TrialState.PAUSED)
    if life.run is RunStage.QUEUED:
        return replace(life, run=RunStage.NONE), (TrialEffect.WITHDRAW,)
    return _preempt(life)


def _preempt(life: TrialLife) -> _TrialOutcome:
    if life.run is not RunStage.RUNNING or life.preempting or life.killing:
        return life, ()
    if life.waiting:
        return _kill(life)
    return replace(life, preempting=True), (TrialEffect.PREEMPT,)


def _kill(life: TrialLife) -> _TrialOutcome:
    if life.run is not RunStage.RUNNING or life.killing:
        return life, ()
    return replace(life, killing=True), (TrialEffect.KILL,)


def _stop_trial(life: TrialLife, target: TrialState, reason: str) -> _TrialOutcome:
    """Move the trial toward a final state. A weaker stop request never overrides a stronger one."""
    if life.state.stopping and _TRIAL_FORCE[life.state] >= _TRIAL_FORCE[target]:
        return life, ()
    life = replace(life, state=target, reason=reason)
    if life.run is RunStage.RUNNING:
        hard = target in (TrialState.STOPPING_KILLED, TrialState.STOPPING_ERROR)
        return _kill(life) if hard else _preempt(life)
    withdraw = (TrialEffect.WITHDRAW,) if life.run is RunStage.QUEUED else ()
    ended = replace(life, state=_ENDS[target], run=RunStage.NONE)
    return ended, (*withdraw, TrialEffect.END)


def _exited(life: TrialLife, event: Exited) -> _TrialOutcome:
    over = replace(life, run=RunStage.NONE, preempting=False, acked=False, killing=False, waiting=False)
    if life.state.stopping:
        return _end(over, _ENDS[life.state], life.reason)
    if life.early_exit and (event.code == 0 or life.killing or event.killed):
        state = TrialState.COMPLETED if life.early_exit == INVALID_HP else TrialState.ERROR
        return _end(over, state, f"the trial exited early: {life.early_exit}")
    if life.killing or event.killed or (event.code == 0 and life.acked):
        return _again(over)
    if event.code == 0:
        return _end(over, TrialState.COMPLETED, "")
    if event.no_retry:
        return _end(over, TrialState.ERROR, event.no_retry)
    over = replace(over, restarts=life.restarts + 1)
    if over.restarts > life.max_restarts:
        what = event.why or f"exit code {event.code}"
        return _end(
            replace(over, restarts=life.restarts), TrialState.ERROR, f"{what}; max_restarts is {life.max_restarts}"
        )
    if event.excluded:
        return _end(over, TrialState.ERROR, event.excluded)
    return _again(over)


def _again(life: TrialLife) -> _TrialOutcome:
    """Request another run, unless the trial is paused."""
    if life.state is TrialState.PAUSED:
        return life, ()
    return replace(life, run=RunStage.QUEUED), (TrialEffect.REQUEST,)


def _end(life: TrialLife, state: TrialState, reason: str) -> _TrialOutcome:
    return replace(life, state=state, reason=reason), (TrialEffect.END,)


class ExperimentEvent(Enum):
    """An event in the life of an experiment."""

    ACTIVATE = "activate"
    PAUSE = "pause"
    CANCEL = "cancel"  # its trials save and stop
    KILL = "kill"  # end now
    SEARCH_COMPLETED = "search_completed"
    SEARCH_FAILED = "search_failed"  # every trial failed
    SEARCH_CANCELED = "search_canceled"  # every trial was canceled or killed
    TRIALS_ENDED = "trials_ended"  # all trials have ended


_EXPERIMENT_STOPS = {
    ExperimentEvent.CANCEL: (ExperimentState.STOPPING_CANCELED, TrialSignal.CANCEL),
    ExperimentEvent.KILL: (ExperimentState.STOPPING_KILLED, TrialSignal.KILL),
    ExperimentEvent.SEARCH_COMPLETED: (ExperimentState.STOPPING_COMPLETED, None),
    ExperimentEvent.SEARCH_FAILED: (ExperimentState.STOPPING_ERROR, None),
    ExperimentEvent.SEARCH_CANCELED: (ExperimentState.STOPPING_CANCELED, None),
}
_EXPERIMENT_FORCE = {
    ExperimentState.STOPPING_COMPLETED: 1,
    ExperimentState.STOPPING_ERROR: 1,
    ExperimentState.STOPPING_CANCELED: 2,
    ExperimentState.STOPPING_KILLED: 3,
}


def end_of_search(states: Collection[TrialState]) -> ExperimentEvent:
    """Return the experiment event for the end of a search, given the states of all its trials."""
    if set(states) == {TrialState.ERROR}:
        return ExperimentEvent.SEARCH_FAILED
    if set(states) == {TrialState.CANCELED}:
        return ExperimentEvent.SEARCH_CANCELED
    return ExperimentEvent.SEARCH_COMPLETED


_PROGRESSED = (TrialState.PAUSED, TrialState.ERROR, TrialState.COMPLETED, TrialState.ACTIVE)


def unmanaged_state(states: Collection[TrialState]) -> ExperimentState:
    """Return the state of an unmanaged experiment: the most advanced state among its trials, in the
    order PAUSED, ERROR, COMPLETED, ACTIVE. A canceled trial counts as paused, as in Determined."""
    return _PROGRESSED[max((_PROGRESSED.index(state) for state in states if state in _PROGRESSED), default=0)]


def step_experiment(state: ExperimentState, event: ExperimentEvent) -> tuple[ExperimentState, TrialSignal | None]:
    """Return the experiment's state after an event, and the signal for its live trials, if any.

    An event that does not apply changes nothing. A weaker stop request never overrides a stronger
    one.
    """
    if event is ExperimentEvent.ACTIVATE and state is ExperimentState.PAUSED:
        return ExperimentState.ACTIVE, TrialSignal.START
    if event is ExperimentEvent.PAUSE and state is ExperimentState.ACTIVE:
        return ExperimentState.PAUSED, TrialSignal.PAUSE
    if event is ExperimentEvent.TRIALS_ENDED and state.stopping:
        return _ENDS[state], None
    if event not in _EXPERIMENT_STOPS or state.final:
        return state, None
    target, signal = _EXPERIMENT_STOPS[event]
    if state.stopping and _EXPERIMENT_FORCE[state] >= _EXPERIMENT_FORCE[target]:
        return state, None
    return target, signal


# -- assignment of slots to queued runs


@dataclass(frozen=True)
class QueuedRun:
    """A queued allocation. ``order``: sort key for order of arrival."""

    allocation_id: str
    experiment_id: int
    slots: int
    priority: int
    order: tuple[float, ...]
    max_slots: int | None = None
    pool: str = POOL
    single: bool = False  # must run on a single machine

    @classmethod
    def of(cls, run: Allocation, resources: Mapping[str, Any]) -> QueuedRun:
        """Return the queue's view of an allocation, from its experiment's ``resources``."""
        slots, priority = resources.get("slots_per_trial"), resources.get("priority")
        return cls(
            allocation_id=run.id,
            experiment_id=run.experiment_id,
            slots=1 if slots is None else int(slots),
            priority=42 if priority is None else int(priority),
            order=(run.experiment_id, run.trial_id),
            max_slots=resources.get("max_slots"),
            pool=resources.get("resource_pool") or POOL,
            single=bool(resources.get("is_single_node")),
        )


def queue_order(queue: Iterable[QueuedRun]) -> list[QueuedRun]:
    """Sort the queue: lower priority numbers first, then first come, first served."""
    return sorted(queue, key=lambda item: (item.priority, item.order))


@dataclass(frozen=True)
class Machine:
    """The slots of a machine: the count of enabled slots, and the numbers of the free ones."""

    name: str
    enabled: int
    free: tuple[int, ...]
    pools: tuple[str, ...] = (POOL,)


def assign_slots(
    queue: Iterable[QueuedRun], machines: Sequence[Machine], used: Mapping[int, int]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the slots that can be assigned now, and the reason why each other run waits; both by
    allocation. Each run gets all its slots or none, lowest numbers first.

    No running allocation is preempted. A run that does not fit does not block runs of the same
    priority. It blocks less urgent runs on the machines that they share (even if the pools differ),
    so that a large urgent run gets the slots of its pool as they become free. A run blocks no
    others if it cannot fit even on empty machines (because slots are disabled), or if its
    experiment has used up its ``max_slots``.

    Args:
        used: number of slots that each experiment holds, by experiment id.
    """
    left = {machine.name: machine.free for machine in machines}
    held = Counter(used)
    placed: dict[str, tuple[int, ...]] = {}
    waiting: dict[str, str] = {}
    reserved: dict[str, int] = {}  # by machine: priority of the run that its next free slots are reserved for
    for item in queue_order(queue):
        pool = [machine for machine in machines if item.pool in machine.pools and machine.enabled]
        usable = sum(machine.enabled for machine in pool)
        parts = shape(item.slots, [machine.enabled for machine in pool])
        if item.single and parts is not None and parts[0] > 1:
            parts = None
        more_urgent = [reserved[m.name] for m in pool if reserved.get(m.name, item.priority) < item.priority]
        open_to_it = [left[m.name] for m in pool if reserved.get(m.name, item.priority) >= item.priority]
        if parts is None:
            apart = ", but the machines cannot provide them in equal parts" if item.slots <= usable else ""
            waiting[item.allocation_id] = f"the trial needs {_slots(item.slots)}; enabled here: {usable}{apart}"
        elif item.slots == 0:
            placed[item.allocation_id] = ()
        elif item.max_slots is not None and held[item.experiment_id] + item.slots > item.max_slots:
            waiting[item.allocation_id] = f"the experiment has used up its max_slots, {item.max_slots}"
        elif (found := fit(*parts, open_to_it)) is None:
            for machine in pool:
                reserved.setdefault(machine.name, item.priority)
            waiting[item.allocation_id] = (
                f"a run of priority {min(more_urgent)} is scheduled before its own, {item.priority}"
                if more_urgent
                else f"the trial needs {_slots(item.slots)}, more than are free"
            )
        else:
            placed[item.allocation_id] = found
            left = {name: tuple(slot for slot in free if slot not in found) for name, free in left.items()}
            held[item.experiment_id] += item.slots
    return placed, waiting


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
