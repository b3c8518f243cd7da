"""One change of the master's state: an event and all that follows from it, in one transaction.

What has to be done outside (processes) is collected and done after the commit. A crash before the commit undoes everything, a crash after it
leaves a state from which the same orders are given again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING

from zero_trial.master.core.runs import Runs
from zero_trial.master.core.searching import Ended, SearchEvent, Searching
from zero_trial.master.lifecycle import experiment as experiment_life
from zero_trial.master.lifecycle import trial as trial_life
from zero_trial.master.lifecycle.trial import Run, TrialLife
from zero_trial.master.records import Allocation, AllocationState, Experiment, ExperimentState, Trial, TrialState
from zero_trial.master.store import experiments, trials
from zero_trial.master.verbs import NotFound

if TYPE_CHECKING:
    from zero_trial.master.core.hub import Hub

EARLY_EXIT_SECONDS = 60.0
"""How long a trial that said that it ends may take for it."""


class Change:
    """What is being changed; made by the hub under its lock, settled once before the commit."""

    def __init__(self, hub: Hub, connection: sqlite3.Connection, now: float) -> None:
        self.connection = connection
        self.now = now
        self.orders: list[Callable[[], None]] = []  # to be done after the commit, in this order
        self.notes: list[tuple[int, str, str]] = []  # (trial, level, line) for the trial's log
        self.signal = False  # somebody who waits for a preemption has to look
        self.chores = False  # checkpoints or experiments are to be deleted
        self.queue_changed = False
        self.touched: set[int] = set()  # experiments whose search has moved
        self._hub = hub
        self.runs = Runs(self, hub)
        self._searching = Searching(self, hub)

    # -- events

    def trial(self, trial_id: int, event: trial_life.Event) -> None:
        """An event of a trial and what follows for its run."""
        trial = self.trial_of(trial_id)
        run = trials.newest_allocation(self.connection, trial_id)
        before = self._life(trial, run)
        after, effects = trial_life.step(before, event)
        if isinstance(event, trial_life.Exited) and run is not None:
            self.runs.end(run, event.code)
        self._write(trial_id, run, before, after)
        for effect in effects:
            self._do(effect, trial_id, run, after)

    def experiment(self, experiment_id: int, event: experiment_life.Event) -> None:
        """An event of an experiment and what follows for its trials."""
        state = self.state_of(experiment_id)
        after, effects = experiment_life.step(state, event)
        if after is not state:
            experiments.change(self.connection, experiment_id, state=after)
        for effect in effects:
            self._do_experiment(effect, experiment_id, after)
        if after.stopping:
            self._settle_experiment(experiment_id)

    def search(self, event: SearchEvent) -> None:
        """Something that the search is told before the commit."""
        self._searching.put(event)

    def settle(self) -> None:
        """Tell the searches what happened until nothing follows any more, then give out free slots."""
        self._searching.settle()
        if self.queue_changed and self._hub.serving:
            self.runs.schedule()

    def state_of(self, experiment_id: int) -> ExperimentState:
        """NotFound if there is no such experiment."""
        return self.experiment_of(experiment_id).state

    # -- trials

    def _life(self, trial: Trial, run: Allocation | None) -> TrialLife:
        config = self.experiment_of(trial.experiment_id).config
        if run is None or run.state is AllocationState.TERMINATED:
            stage = Run.NONE
        else:
            stage = Run.QUEUED if run.state is AllocationState.QUEUED else Run.RUNNING
        return TrialLife(
            state=trial.state,
            run=stage,
            restarts=trial.restarts,
            max_restarts=int(config.get("max_restarts", 5)),
            preempting=stage is Run.RUNNING and run is not None and run.preempt,
            acked=stage is Run.RUNNING and run is not None and run.acked,
            killing=stage is Run.RUNNING and run is not None and trials.killing(self.connection, run.id),
            early_exit=trials.early_exit(self.connection, trial.id),
            reason=trial.reason,
        )

    def _write(self, trial_id: int, run: Allocation | None, before: TrialLife, after: TrialLife) -> None:
        names = ("state", "restarts", "early_exit", "reason")
        changed = {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}
        trials.change(self.connection, trial_id, **changed)
        if run is not None and after.run is Run.RUNNING:
            pairs = {"preempt": "preempting", "acked": "acked", "killing": "killing"}
            flags = {
                column: int(getattr(after, name))
                for column, name in pairs.items()
                if getattr(before, name) != getattr(after, name)
            }
            trials.change_allocation(self.connection, run.id, **flags)

    def _do(self, effect: trial_life.Effect, trial_id: int, run: Allocation | None, life: TrialLife) -> None:
        if effect is trial_life.Effect.REQUEST:
            self.runs.request(trial_id)
        elif effect is trial_life.Effect.END:
            self._end_trial(trial_id, life)
        elif run is None:
            return
        elif effect is trial_life.Effect.WITHDRAW:
            self.runs.end(run, None)
        elif effect is trial_life.Effect.PREEMPT:
            config = self.experiment_of(run.experiment_id).config
            seconds = float(config.get("preemption_timeout") or 3600)
            trials.change_allocation(self.connection, run.id, deadline=self.now + seconds)
            self.signal = True
        elif effect is trial_life.Effect.WATCH:
            trials.change_allocation(self.connection, run.id, deadline=self.now + EARLY_EXIT_SECONDS)
        elif effect is trial_life.Effect.KILL:
            name = run.id
            self.orders.append(lambda: self._hub.workers.kill(name))
            self.notes.append((trial_id, "WARNING", "the master ends this run"))

    def _end_trial(self, trial_id: int, life: TrialLife) -> None:
        trials.change(self.connection, trial_id, ended=self.now)
        trial = self.trial_of(trial_id)
        if life.state is not TrialState.COMPLETED or life.reason:
            level = "ERROR" if life.state is TrialState.ERROR else "INFO"
            self.notes.append((trial_id, level, f"trial {trial_id} is {life.state.value}: {life.reason}"))
        self.search(Ended(trial, trial_life.exit_reason(life)))
        self._settle_experiment(trial.experiment_id)

    # -- experiments

    def _do_experiment(self, effect: experiment_life.Effect, experiment_id: int, state: ExperimentState) -> None:
        events: dict[experiment_life.Effect, trial_life.Event] = {
            experiment_life.Effect.START_TRIALS: trial_life.Start(),
            experiment_life.Effect.PAUSE_TRIALS: trial_life.Pause(),
            experiment_life.Effect.CANCEL_TRIALS: trial_life.Cancel(),
            experiment_life.Effect.KILL_TRIALS: trial_life.Kill(),
        }
        if effect in events:
            for trial in trials.live(self.connection, experiment_id):
                self.trial(trial.id, events[effect])
            return
        progress = {"progress": 1.0} if state is ExperimentState.COMPLETED else {}
        experiments.change(self.connection, experiment_id, ended=self.now, collect=1, **progress)
        self._hub.forget(experiment_id)
        self.chores = True

    def _settle_experiment(self, experiment_id: int) -> None:
        """An experiment that is stopping ends with its last trial."""
        if self.state_of(experiment_id).stopping and not trials.live(self.connection, experiment_id):
            self.experiment(experiment_id, experiment_life.Settled())

    def give_up(self, experiment_id: int, error: str) -> None:
        """Nothing more can be decided: the experiment ends as failed, with its trials."""
        experiments.change(self.connection, experiment_id, error=error)
        self.experiment(experiment_id, experiment_life.SearchOver(failed=True))
        for trial in trials.live(self.connection, experiment_id):
            self.trial(trial.id, trial_life.Fail(error))

    # -- reading

    def trial_of(self, trial_id: int) -> Trial:
        trial = trials.get(self.connection, trial_id)
        if trial is None:
            raise NotFound(f"trial {trial_id} not found")
        return trial

    def experiment_of(self, experiment_id: int) -> Experiment:
        found = experiments.get(self.connection, experiment_id, derived=False)
        if found is None:
            raise NotFound(f"experiment {experiment_id} not found")
        return found
