"""Unmanaged trials: processes that this master did not start, which report what they do by
themselves, as ``determined.experimental.core_v2`` does in a script of one's own.

They have no runs, no slots and no search. Their state is what they say it is; one that is active
sends a heartbeat each minute, and ends as failed if none comes for five. The state of their
experiment follows from theirs.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_trial.master.core import lifecycle
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import Transaction, transaction
from zero_trial.master.records import (
    Conflict,
    Experiment,
    ExperimentState,
    Invalid,
    Trial,
    TrialState,
    existing,
)
from zero_trial.master.store import checkpoint_rows, experiment_rows, metric_rows, trial_rows

LOST_SECONDS = 300.0  # without a heartbeat
_STATES = {
    "ACTIVE": TrialState.ACTIVE,
    "RUNNING": TrialState.ACTIVE,
    "PAUSED": TrialState.PAUSED,
    "COMPLETED": TrialState.COMPLETED,
    "CANCELED": TrialState.CANCELED,
    "ERROR": TrialState.ERROR,
}


@dataclass(frozen=True)
class StartedRun:
    """A run of an unmanaged trial, and where it goes on."""

    run_id: int
    latest_checkpoint: str | None
    steps_completed: int


class UnmanagedService:
    """Creates unmanaged trials, and takes their states and heartbeats."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    def create(self, experiment_id: int, hparams: Mapping[str, Any], external_id: str | None = None) -> Trial:
        """Create a trial, which waits to be started; one whose ``external_id`` is known is returned
        as it is. Raises NotFound or Conflict.
        """
        with transaction(self._state) as tx:
            experiment = tx.experiment_of(experiment_id)
            _require_unmanaged(experiment)
            known = (
                None if external_id is None else trial_rows.of_external_id(tx.connection, experiment_id, external_id)
            )
            number = known.id if known is not None else self._add(tx, experiment, hparams, external_id)
        return self._get(number)

    def _add(self, tx: Transaction, experiment: Experiment, hparams: Mapping[str, Any], external_id: str | None) -> int:
        name = str(uuid.uuid4()) if external_id is None else external_id
        return trial_rows.add(
            tx.connection,
            Trial(
                id=0,
                experiment_id=experiment.id,
                request_id=name,
                task_id=f"{experiment.id}.{name}",
                state=TrialState.PAUSED,
                hparams=dict(hparams),
                seed=0,
                created=tx.now,
                external_id=external_id,
                last_activity=tx.now,
            ),
        )

    def start(self, trial_id: int, *, resume: bool) -> StartedRun:
        """Begin a run of a trial; from the second on, it goes on from the newest checkpoint.

        Raises NotFound or Conflict, also if it was started before and ``resume`` is False.
        """
        with transaction(self._state) as tx:
            trial, experiment = self._own(tx, trial_id)
            if trial.run_id and not resume:
                raise Conflict(f"trial {trial_id} was started before", fix="Resume it, or create another.")
            run_id = trial.run_id + 1
            saved = checkpoint_rows.latest(tx.connection, trial_id) if trial.run_id else None
            trial_rows.change(
                tx.connection,
                trial_id,
                run_id=run_id,
                state=TrialState.ACTIVE,
                ended=None,
                reason="",
                last_activity=tx.now,
            )
            _settle(tx, experiment)
            return StartedRun(run_id, saved.uuid if saved else None, saved.steps_completed if saved else 0)

    def patch(self, trial_id: int, state: str | None = None) -> Trial:
        """Record a heartbeat, and the state of a trial if one is given (without ``STATE_``). Raises
        NotFound, Invalid or Conflict.
        """
        with transaction(self._state) as tx:
            _, experiment = self._own(tx, trial_id)
            changes: dict[str, Any] = {"last_activity": tx.now}
            if state is not None:
                if state not in _STATES:
                    raise Invalid("not a state of an unmanaged trial", got=state[:60], expected=", ".join(_STATES))
                changes["state"] = _STATES[state]
                changes["ended"] = tx.now if _STATES[state].final else None
                metric_rows.keep_summary(tx.connection, trial_id)
            trial_rows.change(tx.connection, trial_id, **changes)
            _settle(tx, experiment)
        return self._get(trial_id)

    def end_silent(self) -> None:
        """End the active trials that have sent nothing for five minutes in which they could."""
        now = self._state.clock()
        if now < self._state.began + LOST_SECONDS:
            return  # this master was not there: their heartbeats came to nothing
        found = self._state.read(trial_rows.silent, now - LOST_SECONDS)
        for trial in found:
            with transaction(self._state) as tx:
                fresh, experiment = self._own(tx, trial.id)
                if fresh.last_activity == trial.last_activity and fresh.state is TrialState.ACTIVE:
                    why = f"no heartbeat came for {LOST_SECONDS:.0f} s"
                    trial_rows.change(
                        tx.connection, trial.id, state=TrialState.ERROR, ended=trial.last_activity, reason=why
                    )
                    tx.note(trial.id, "ERROR", f"trial {trial.id} is ERROR: {why}")
                    _settle(tx, experiment)

    def _own(self, tx: Transaction, trial_id: int) -> tuple[Trial, Experiment]:
        trial = tx.trial_of(trial_id)
        experiment = tx.experiment_of(trial.experiment_id)
        _require_unmanaged(experiment)
        return trial, experiment

    def _get(self, trial_id: int) -> Trial:
        return existing(self._state.read(trial_rows.get, trial_id, derived=True), f"trial {trial_id}")


def require_managed(experiment: Experiment) -> None:
    """Raise Conflict for an unmanaged experiment: nothing here runs its trials."""
    if experiment.unmanaged:
        raise Conflict(f"experiment {experiment.id} is unmanaged", fix="End the script that reports to it.")


def _require_unmanaged(experiment: Experiment) -> None:
    if not experiment.unmanaged:
        raise Conflict(f"experiment {experiment.id} is managed", expected="an unmanaged experiment")
    if experiment.state is ExperimentState.DELETING:
        raise Conflict(f"experiment {experiment.id} is being deleted")


def _settle(tx: Transaction, experiment: Experiment) -> None:
    """Give an experiment the state that follows from those of its trials."""
    known = trial_rows.of_experiment(tx.connection, experiment.id)
    state = lifecycle.unmanaged_state([trial.state for trial in known])
    if state is experiment.state:
        return
    ends = [trial.ended for trial in known if trial.ended is not None]
    changes: dict[str, Any] = {"state": state, "ended": max(ends, default=tx.now) if state.final else None}
    if state is ExperimentState.COMPLETED:
        changes["progress"] = 1.0
    experiment_rows.change(tx.connection, experiment.id, **changes)
