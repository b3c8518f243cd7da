"""The runs of trials in one change: queued, given slots, ordered to start, ended."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zero_trial.master import auth, scheduler
from zero_trial.master.agent.environment import StartOrder
from zero_trial.master.core import experiment_lifecycle as experiment_life
from zero_trial.master.core import trial_lifecycle as trial_life
from zero_trial.master.core.searching import Ended, SearchEvent, Searching
from zero_trial.master.core.trial_lifecycle import RunStage, TrialLife
from zero_trial.master.errors import NotFound
from zero_trial.master.records import Allocation, AllocationState, Experiment, ExperimentState, Trial, TrialState
from zero_trial.master.store import accounts, checkpoints, experiments, metrics, trials

if TYPE_CHECKING:
    from zero_trial.master.core.state import MasterState


class Runs:
    """The allocations' part of one change."""

    def __init__(self, change: Transaction, hub: MasterState) -> None:
        self._change = change
        self._hub = hub

    def request(self, trial_id: int) -> None:
        """A new run goes into the queue. It starts from the newest checkpoint, and what was reported after that is archived."""
        trial = self._change.trial_of(trial_id)
        saved = checkpoints.latest(self._change.connection, trial_id)
        steps = saved.steps_completed if saved else 0
        if trial.run_id:
            metrics.archive_after(self._change.connection, trial_id, steps)
        run_id = trial.run_id + 1
        trials.change(
            self._change.connection,
            trial_id,
            run_id=run_id,
            steps_completed=steps,
            latest_checkpoint=saved.uuid if saved else None,
            early_exit="",
            runner_state="",
        )
        name = f"{trial.task_id}.{run_id}"
        trials.add_allocation(
            self._change.connection,
            Allocation(
                id=name,
                trial_id=trial_id,
                experiment_id=trial.experiment_id,
                task_id=trial.task_id,
                run_id=run_id,
                state=AllocationState.QUEUED,
                slots=(),
                created=self._change.now,
                resources_id=str(uuid.uuid4()),
                container_id=str(uuid.uuid4()),
            ),
        )
        self._change.queue_changed = True

    def end(self, run: Allocation, code: int | None) -> None:
        """It holds nothing any more; ``code`` None: it never started."""
        trials.change_allocation(
            self._change.connection,
            run.id,
            state=AllocationState.TERMINATED,
            ended=self._change.now,
            exit_code=code,
            deadline=None,
        )
        accounts.drop_tokens_of(self._change.connection, run.id)
        self._change.queue_changed = self._change.signal = True

    def order_start(self, run: Allocation) -> None:
        """Order the start of an allocation that has its slots, with a token of its own."""
        trial = self._change.trial_of(run.trial_id)
        experiment = self._change.experiment_of(run.experiment_id)
        token = auth.new_token()
        accounts.add_token(self._change.connection, auth.digest(token), allocation_id=run.id)
        order = StartOrder(
            allocation=run,
            config=experiment.config,
            hparams=trial.hparams,
            seed=trial.seed,
            steps_completed=trial.steps_completed,
            latest_checkpoint=trial.latest_checkpoint or trial.warm_start_checkpoint,
            owner=experiment.owner,
            token=token,
            master_url=self._hub.master_url,
            cluster_id=self._hub.info.cluster_id,
            agent_id=self._hub.agent_id,
            visible_devices=self._hub.devices.visible(run.slots),
            threads=self._hub.devices.threads,
            has_hook=self._hub.context_of(self._change.connection, run.experiment_id).has_hook,
        )
        self._change.orders.append(lambda: self._hub.workers.start(order))

    def schedule(self) -> None:
        """Give free slots to those who wait."""
        self._change.queue_changed = False
        runs = trials.allocations(self._change.connection)
        holding = {slot for run in runs for slot in run.slots}
        off = accounts.disabled_slots(self._change.connection)
        free = [slot for slot in range(self._hub.devices.count) if slot not in holding and slot not in off]
        used: dict[int, int] = {}
        for run in runs:
            used[run.experiment_id] = used.get(run.experiment_id, 0) + len(run.slots)
        for made in scheduler.place(self._waiting(runs), free, used):
            self._give(made)

    def _waiting(self, runs: list[Allocation]) -> list[scheduler.Waiting]:
        known: dict[int, Mapping[str, Any]] = {}
        queue = []
        for run in runs:
            if run.state is not AllocationState.QUEUED:
                continue
            if run.experiment_id not in known:
                known[run.experiment_id] = self._change.experiment_of(run.experiment_id).config.get("resources") or {}
            queue.append(waiting(run, known[run.experiment_id]))
        return queue

    def _give(self, made: scheduler.SlotAssignment) -> None:
        trials.change_allocation(
            self._change.connection,
            made.allocation_id,
            state=AllocationState.STARTING,
            slots=made.slots,
            started=self._change.now,
        )
        run = trials.allocation(self._change.connection, made.allocation_id)
        if run is None:
            raise NotFound(f"allocation {made.allocation_id} is gone")
        self.order_start(run)


def waiting(run: Allocation, resources: Mapping[str, Any]) -> scheduler.Waiting:
    """A queued allocation as the scheduler sees it; ``resources`` is its experiment's section."""
    slots = resources.get("slots_per_trial")
    priority = resources.get("priority")
    return scheduler.Waiting(
        allocation_id=run.id,
        experiment_id=run.experiment_id,
        slots=1 if slots is None else int(slots),
        priority=42 if priority is None else int(priority),
        order=(run.experiment_id, run.trial_id),
        max_slots=resources.get("max_slots"),
    )


# One change of the master's state: an event and all that follows from it, in one transaction.
#
# What has to be done outside (processes) is collected and done after the commit. A crash before the commit undoes everything, a crash after it
# leaves a state from which the same orders are given again.


EARLY_EXIT_SECONDS = 60.0
"""How long a trial that said that it ends may take for it."""


class Transaction:
    """What is being changed; made by the hub under its lock, settled once before the commit."""

    def __init__(self, hub: MasterState, connection: sqlite3.Connection, now: float) -> None:
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

    def trial(self, trial_id: int, event: trial_life.TrialEvent) -> None:
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

    def experiment(self, experiment_id: int, event: experiment_life.ExperimentEvent) -> None:
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
            stage = RunStage.NONE
        else:
            stage = RunStage.QUEUED if run.state is AllocationState.QUEUED else RunStage.RUNNING
        return TrialLife(
            state=trial.state,
            run=stage,
            restarts=trial.restarts,
            max_restarts=int(config.get("max_restarts", 5)),
            preempting=stage is RunStage.RUNNING and run is not None and run.preempt,
            acked=stage is RunStage.RUNNING and run is not None and run.acked,
            killing=stage is RunStage.RUNNING and run is not None and trials.killing(self.connection, run.id),
            early_exit=trials.early_exit(self.connection, trial.id),
            reason=trial.reason,
        )

    def _write(self, trial_id: int, run: Allocation | None, before: TrialLife, after: TrialLife) -> None:
        names = ("state", "restarts", "early_exit", "reason")
        changed = {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}
        trials.change(self.connection, trial_id, **changed)
        if run is not None and after.run is RunStage.RUNNING:
            pairs = {"preempt": "preempting", "acked": "acked", "killing": "killing"}
            flags = {
                column: int(getattr(after, name))
                for column, name in pairs.items()
                if getattr(before, name) != getattr(after, name)
            }
            trials.change_allocation(self.connection, run.id, **flags)

    def _do(self, effect: trial_life.TrialEffect, trial_id: int, run: Allocation | None, life: TrialLife) -> None:
        if effect is trial_life.TrialEffect.REQUEST:
            self.runs.request(trial_id)
        elif effect is trial_life.TrialEffect.END:
            self._end_trial(trial_id, life)
        elif run is None:
            return
        elif effect is trial_life.TrialEffect.WITHDRAW:
            self.runs.end(run, None)
        elif effect is trial_life.TrialEffect.PREEMPT:
            config = self.experiment_of(run.experiment_id).config
            seconds = float(config.get("preemption_timeout") or 3600)
            trials.change_allocation(self.connection, run.id, deadline=self.now + seconds)
            self.signal = True
        elif effect is trial_life.TrialEffect.WATCH:
            trials.change_allocation(self.connection, run.id, deadline=self.now + EARLY_EXIT_SECONDS)
        elif effect is trial_life.TrialEffect.KILL:
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

    def _do_experiment(
        self, effect: experiment_life.ExperimentEffect, experiment_id: int, state: ExperimentState
    ) -> None:
        events: dict[experiment_life.ExperimentEffect, trial_life.TrialEvent] = {
            experiment_life.ExperimentEffect.START_TRIALS: trial_life.StartTrial(),
            experiment_life.ExperimentEffect.PAUSE_TRIALS: trial_life.PauseTrial(),
            experiment_life.ExperimentEffect.CANCEL_TRIALS: trial_life.CancelTrial(),
            experiment_life.ExperimentEffect.KILL_TRIALS: trial_life.KillTrial(),
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
