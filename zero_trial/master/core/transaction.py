"""A transaction of the master's state: one event and all its consequences, in one database
transaction.

An event changes the lifecycle state of a trial or an experiment (`lifecycle`). The effects request,
preempt or end runs and feed the search, which in turn creates and stops trials. Free slots are
assigned last. Actions outside the store (starting and killing processes) are collected as orders
and carried out after the commit. A crash before the commit undoes everything; after a crash past
the commit, `Master.begin` issues the same orders again.
"""

from __future__ import annotations

import logging
import sqlite3
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

from zero_trial.master import logs
from zero_trial.master.agent.environment import StartOrder
from zero_trial.master.core import lifecycle
from zero_trial.master.core.accounts import digest, new_token
from zero_trial.master.core.lifecycle import (
    ExperimentEvent,
    Machine,
    QueuedRun,
    RunStage,
    TrialLife,
    TrialSignal,
    assign_slots,
)
from zero_trial.master.core.state import MasterState
from zero_trial.master.logs import LogMatch
from zero_trial.master.records import (
    Allocation,
    AllocationState,
    Experiment,
    ExperimentState,
    Trial,
    TrialState,
    existing,
)
from zero_trial.master.search import pruning
from zero_trial.master.search.searcher import Action, Create, ExitReason, MetricMissing, Searcher, Shutdown, Stop
from zero_trial.master.store import checkpoint_rows, experiment_rows, trial_rows, user_rows
from zero_trial.master.store import metric_rows as metrics
from zero_trial.master.store.database import drop

log = logging.getLogger(__name__)

# how long a trial may run after it has reported an early exit; for invalid hyperparameters, the
# timeout of Determined's master (InvalidHPKillDelay)
_EARLY_EXIT_SECONDS = 60.0
_INVALID_HP_SECONDS = 10.0


_SearchEvent: TypeAlias = Callable[[Searcher], list[Action]]


@contextmanager
def transaction(state: MasterState) -> Iterator[Transaction]:
    """Change the state with all consequences, all or nothing. The lock serializes transactions."""
    with state.lock:
        tx: Transaction | None = None
        try:
            with state.database.transaction() as connection:
                tx = Transaction(state, connection, state.clock())
                yield tx
                tx.finish()
        except BaseException:
            # The searchers are ahead of the rolled-back store: drop them, to restore them from it.
            for experiment_id in tx.touched if tx is not None else ():
                state.searches.pop(experiment_id, None)
            state.waiting.clear()
            raise
        for trial_id, level, line in tx.notes:
            state.log_to_trial(trial_id, line, level)
        for order in tx.orders:
            try:
                order()
            except Exception:  # the change is committed; the other orders and waiting requests must still proceed
                log.exception("an order could not be passed to the agent")
    if tx.signal:
        with state.signaled:
            state.signaled.notify_all()
    if tx.garbage:
        state.has_garbage.set()


class Transaction:
    """Applies events within an open database transaction, which `transaction` commits."""

    def __init__(self, state: MasterState, connection: sqlite3.Connection, now: float) -> None:
        self.connection = connection
        self.now = now
        # carried out after the commit, in this order
        self.orders: list[Callable[[], None]] = []
        self.notes: list[tuple[int, str, str]] = []  # (trial, level, line) for the trial's log
        self.signal = False  # wake up the requests that wait for a preemption
        self.garbage = False  # there are checkpoints or experiments to delete
        self.queue_changed = False
        self.touched: set[int] = set()  # experiments whose search has advanced
        self._state = state
        self._search_events: deque[tuple[int, _SearchEvent, int | None]] = deque()

    # -- events

    def apply_to_trial(self, trial_id: int, event: lifecycle.TrialEvent) -> None:
        """Apply an event to a trial, with all consequences for its run."""
        trial = self.trial_of(trial_id)
        run = trial_rows.newest_allocation(self.connection, trial_id)
        before = self._life(trial, run)
        after, effects = lifecycle.step_trial(before, event)
        if isinstance(event, lifecycle.Exited) and run is not None:
            self._end_run(run, event.code)
        self._write(trial_id, run, before, after)
        for effect in effects:
            self._carry_out(effect, trial_id, run, after)

    def apply_to_experiment(self, experiment_id: int, event: lifecycle.ExperimentEvent) -> None:
        """Apply an event to an experiment, with all consequences for its trials."""
        state = self.state_of(experiment_id)
        after, signal = lifecycle.step_experiment(state, event)
        if after is state:
            return
        experiment_rows.change(self.connection, experiment_id, state=after)
        if signal is not None:
            for trial in trial_rows.live(self.connection, experiment_id):
                self.apply_to_trial(trial.id, signal)
        if after.stopping:
            self._end_if_no_trial_is_left(experiment_id)
        elif after.final:
            self._end_experiment(experiment_id, after)

    def search(self, experiment_id: int, event: _SearchEvent, measured: int | None = None) -> None:
        """Queue an event for a search; it is delivered before the commit. ``measured``: the trial
        to fail if the searcher's metric is missing."""
        self._search_events.append((experiment_id, event, measured))

    def note(self, trial_id: int, level: str, line: str) -> None:
        """Write a line to a trial's log after the commit."""
        self.notes.append((trial_id, level, line))

    def add_log_match(self, run: Allocation, match: LogMatch) -> None:
        """Record that a log policy has matched a line of a run; repeated matches count once."""
        if not trial_rows.add_log_match(self.connection, run.task_id, match):
            return
        policy, level, line = match.policy, "INFO", str(match)
        if policy.action == logs.CANCEL_RETRIES:
            level, line = "WARNING", f"{match} therefore the trial is not restarted if it fails"
        elif policy.action == logs.EXCLUDE_NODE:
            level, line = "ERROR", logs.why_excluded([match], self._state.nodes_of(run.slots)[0].name)
        if policy.name:
            trial_rows.change(self.connection, run.trial_id, log_policy_matched=policy.name)
            line = f"log policy {policy.name!r} {line}"
        self.note(run.trial_id, level, line)

    def reschedule(self) -> None:
        """Assign free slots before the commit, because the queue or the slots have changed."""
        self.queue_changed = True

    def finish(self) -> None:
        """Deliver search events until none is left, then assign free slots."""
        while self._search_events:
            self._pass_to_search(*self._search_events.popleft())
        for experiment_id in sorted(self.touched):
            search = self._state.searches.get(experiment_id)
            if search is not None:
                experiment_rows.change(self.connection, experiment_id, snapshot=search.snapshot())
        if self.queue_changed and self._state.serving:
            self._schedule()

    def state_of(self, experiment_id: int) -> ExperimentState:
        """Return the state of an experiment. Raises NotFound."""
        return existing(experiment_rows.state_of(self.connection, experiment_id), f"experiment {experiment_id}")[0]

    # -- trials

    def _life(self, trial: Trial, run: Allocation | None) -> TrialLife:
        stage = RunStage.NONE
        if run is not None and run.state is not AllocationState.TERMINATED:
            stage = RunStage.QUEUED if run.state is AllocationState.QUEUED else RunStage.RUNNING
        return TrialLife(
            state=trial.state,
            run=stage,
            restarts=trial.restarts,
            max_restarts=int(self.experiment_of(trial.experiment_id).config.get("max_restarts", 5)),
            preempting=stage is RunStage.RUNNING and run is not None and run.preempt,
            acked=stage is RunStage.RUNNING and run is not None and run.acked,
            killing=stage is RunStage.RUNNING and run is not None and trial_rows.killing(self.connection, run.id),
            waiting=run is not None and run.state is AllocationState.STARTING and run.id in self._state.submitted,
            early_exit=trial_rows.early_exit(self.connection, trial.id),
            reason=trial.reason,
        )

    def _write(self, trial_id: int, run: Allocation | None, before: TrialLife, after: TrialLife) -> None:
        names = ("state", "restarts", "early_exit", "reason")
        changed = {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}
        trial_rows.change(self.connection, trial_id, **changed)
        if run is not None and after.run is RunStage.RUNNING:
            if before.run is RunStage.QUEUED:
                trial_rows.change_allocation(self.connection, run.id, state=AllocationState.STARTING)
            pairs = {"preempt": "preempting", "acked": "acked", "killing": "killing"}
            flags = {
                column: int(getattr(after, name))
                for column, name in pairs.items()
                if getattr(before, name) != getattr(after, name)
            }
            trial_rows.change_allocation(self.connection, run.id, **flags)

    def _carry_out(self, effect: lifecycle.TrialEffect, trial_id: int, run: Allocation | None, life: TrialLife) -> None:
        if effect is lifecycle.TrialEffect.REQUEST:
            self._request_run(trial_id)
        elif effect is lifecycle.TrialEffect.END:
            self._end_trial(trial_id, life)
        elif run is None:
            return
        elif effect is lifecycle.TrialEffect.WITHDRAW:
            self._end_run(run, None)
        elif effect is lifecycle.TrialEffect.PREEMPT:
            config = self.experiment_of(run.experiment_id).config
            seconds = float(config.get("preemption_timeout") or 3600)
            trial_rows.change_allocation(self.connection, run.id, deadline=self.now + seconds)
            self.signal = True
        elif effect is lifecycle.TrialEffect.WATCH:
            seconds = _INVALID_HP_SECONDS if life.early_exit == lifecycle.INVALID_HP else _EARLY_EXIT_SECONDS
            trial_rows.change_allocation(self.connection, run.id, deadline=self.now + seconds)
        elif effect is lifecycle.TrialEffect.KILL:
            self.order_kill(run.id)
            self.note(trial_id, "WARNING", "the master ends this run")

    def _end_trial(self, trial_id: int, life: TrialLife) -> None:
        trial_rows.change(self.connection, trial_id, ended=self.now)
        metrics.keep_summary(self.connection, trial_id)
        trial = self.trial_of(trial_id)
        if life.state is not TrialState.COMPLETED or life.reason:
            level = "ERROR" if life.state is TrialState.ERROR else "INFO"
            self.note(trial_id, level, f"trial {trial_id} is {life.state.value}: {life.reason}")
        self._report_exit(trial, lifecycle.exit_reason(life))
        self._end_if_no_trial_is_left(trial.experiment_id)

    # -- experiments

    def _end_experiment(self, experiment_id: int, state: ExperimentState) -> None:
        progress = {"progress": 1.0} if state is ExperimentState.COMPLETED else {}
        collect = int(not self.experiment_of(experiment_id).unmanaged)
        experiment_rows.change(self.connection, experiment_id, ended=self.now, collect=collect, **progress)
        self._state.forget(experiment_id)
        self.garbage = True

    def _end_if_no_trial_is_left(self, experiment_id: int) -> None:
        """End a stopping experiment if none of its trials is live."""
        if self.state_of(experiment_id).stopping and not trial_rows.live(self.connection, experiment_id):
            self.apply_to_experiment(experiment_id, ExperimentEvent.TRIALS_ENDED)

    def give_up(self, experiment_id: int, error: str) -> None:
        """End an experiment as failed, with all its trials."""
        experiment_rows.change(self.connection, experiment_id, error=error)
        self.apply_to_experiment(experiment_id, ExperimentEvent.SEARCH_FAILED)
        for trial in trial_rows.live(self.connection, experiment_id):
            self.apply_to_trial(trial.id, lifecycle.Fail(error))

    # -- runs

    def _request_run(self, trial_id: int) -> None:
        """Queue a run from the newest checkpoint; archive the metrics reported after it. Before the
        first run, prune the trial instead if its hyperparameters cannot be trained."""
        trial = self.trial_of(trial_id)
        if trial.run_id == 0 and (why := self._why_not(trial)) is not None:
            # report it to the search as completed
            reason = f"pruned before launch: {why}"
            end = {"state": TrialState.ERROR, "ended": self.now, "pruned": 1, "reason": reason}
            trial_rows.change(self.connection, trial_id, **end)
            self.note(trial_id, "ERROR", f"pruned before launch because these hyperparameters cannot be trained: {why}")
            self._report_exit(trial, ExitReason.COMPLETED)
            return
        saved = checkpoint_rows.latest(self.connection, trial_id)
        steps = saved.steps_completed if saved else 0
        if trial.run_id:
            metrics.archive_after(self.connection, trial_id, steps)
        run_id = trial.run_id + 1
        trial_rows.change(
            self.connection,
            trial_id,
            run_id=run_id,
            steps_completed=steps,
            latest_checkpoint=saved.uuid if saved else None,
            early_exit="",
            runner_state="",
        )
        name = f"{self._state.allocations_of(trial)}.{run_id}"
        trial_rows.add_allocation(
            self.connection,
            Allocation(
                id=name,
                trial_id=trial_id,
                experiment_id=trial.experiment_id,
                task_id=trial.task_id,
                run_id=run_id,
                state=AllocationState.QUEUED,
                slots=(),
                created=self.now,
                resources_id=str(uuid.uuid4()),
                container_id=str(uuid.uuid4()),
            ),
        )
        self.reschedule()

    def _end_run(self, run: Allocation, code: int | None) -> None:
        """Release the resources of a run.

        Args:
            code: the run's exit code; None if it never started.
        """
        trial_rows.change_allocation(
            self.connection,
            run.id,
            state=AllocationState.TERMINATED,
            ended=self.now,
            exit_code=code,
            deadline=None,
        )
        drop(self.connection, "tokens", "allocation_id", run.id)
        self.signal = True
        self.reschedule()

    def order_kill(self, allocation_id: str) -> None:
        """Order the agent to kill an allocation's processes."""
        self.orders.append(lambda: self._state.agent.kill(allocation_id))

    def order_start(self, run: Allocation) -> None:
        """Order the start of an allocation that has its slots, with its own token."""
        trial = self.trial_of(run.trial_id)
        experiment = self.experiment_of(run.experiment_id)
        token = new_token()
        user_rows.add_token(self.connection, digest(token), allocation_id=run.id)
        off = set(user_rows.disabled_slots(self.connection))
        order = StartOrder(
            allocation=run,
            config=experiment.config,
            hparams=trial.hparams,
            seed=trial.seed,
            steps_completed=trial.steps_completed,
            latest_checkpoint=trial.latest_checkpoint or trial.warm_start_checkpoint,
            owner=experiment.owner,
            token=token,
            master_url=self._state.master_url,
            cluster_id=self._state.info.cluster_id,
            nodes=len(self._state.nodes_of(run.slots)),
            avoid=tuple(node.name for node in self._state.agent.nodes() if node.slots and off.issuperset(node.numbers)),
            has_hook=self._state.context_of(self.connection, run.experiment_id).has_hook,
        )
        self.orders.append(lambda: self._state.agent.start(order))

    def _schedule(self) -> None:
        """Assign free slots to queued runs."""
        self.queue_changed = False
        runs = trial_rows.allocations(self.connection)
        holding = {slot for run in runs for slot in run.slots}
        off = user_rows.disabled_slots(self.connection)
        nodes = [node for node in self._state.agent.nodes() if node.up]
        machines = [
            Machine(
                node.name,
                sum(slot not in off for slot in node.numbers),
                tuple(slot for slot in node.numbers if slot not in off and slot not in holding),
                node.pools,
            )
            for node in nodes
        ]
        used: Counter[int] = Counter()
        for run in runs:
            used[run.experiment_id] += len(run.slots)
        resources = cache(lambda number: self.experiment_of(number).config.get("resources") or {})
        queued = {run.id: run for run in runs if run.state is AllocationState.QUEUED}
        excluded, here = trial_rows.excluded_tasks(self.connection), nodes[0].name if nodes else ""
        banned = {
            name: logs.why_excluded(trial_rows.log_matches(self.connection, run.task_id), here)
            for name, run in queued.items()
            if run.task_id in excluded
        }
        queue = [QueuedRun.of(run, resources(run.experiment_id)) for name, run in queued.items() if name not in banned]
        placed, waiting = assign_slots(queue, machines, used)
        waiting |= banned
        for name, why in waiting.items():  # log each reason once
            if self._state.waiting.get(name) != why:
                self.note(queued[name].trial_id, "INFO", f"run {queued[name].run_id} waits: {why}")
        self._state.waiting.clear()
        self._state.waiting.update(waiting)
        for name, slots in placed.items():
            trial_rows.change_allocation(self.connection, name, slots=slots)
            run = existing(trial_rows.allocation(self.connection, name), f"allocation {name}")
            self.apply_to_trial(run.trial_id, TrialSignal.PLACED)
            self.order_start(run)

    # -- the search

    def _report_exit(self, trial: Trial, reason: ExitReason) -> None:
        self.search(trial.experiment_id, lambda search: search.on_exited(trial.request_id, reason))

    def _pass_to_search(self, experiment_id: int, event: _SearchEvent, measured: int | None) -> None:
        state, unmanaged = existing(
            experiment_rows.state_of(self.connection, experiment_id), f"experiment {experiment_id}"
        )
        if state not in (ExperimentState.ACTIVE, ExperimentState.PAUSED):
            return  # the experiment is stopping: the search has nothing left to decide
        if unmanaged:
            return  # its trials are created from outside
        search = self._state.search_of(self.connection, experiment_id)
        self.touched.add(experiment_id)
        try:
            actions = event(search)
        except MetricMissing as error:
            if measured is not None:
                self.apply_to_trial(measured, lifecycle.Fail(str(error)))
            return
        except Exception as error:  # a bug in a searcher ends this experiment, not the master
            log.exception("the search of experiment %d failed", experiment_id)
            self.give_up(experiment_id, f"the search failed: {type(error).__name__}: {error}")
            return
        for action in actions:
            self._act(experiment_id, action)

    def _act(self, experiment_id: int, action: Action) -> None:
        if isinstance(action, Create):
            self._create(experiment_id, action)
        elif isinstance(action, Stop):
            trial = trial_rows.of_request(self.connection, experiment_id, action.request_id)
            if trial is not None:
                self.apply_to_trial(trial.id, TrialSignal.FINISH if action.finished else TrialSignal.STOP)
        elif isinstance(action, Shutdown):
            known = trial_rows.of_experiment(self.connection, experiment_id)
            end = lifecycle.end_of_search([one.state for one in known])
            reasons = [one.reason for one in known if one.reason]
            if end is ExperimentEvent.SEARCH_FAILED and reasons:
                experiment_rows.change(self.connection, experiment_id, error=reasons[-1])
            self.apply_to_experiment(experiment_id, end)

    def _create(self, experiment_id: int, action: Create) -> None:
        experiment = self.experiment_of(experiment_id)
        if experiment.state not in (ExperimentState.ACTIVE, ExperimentState.PAUSED):
            return
        known = trial_rows.of_request(self.connection, experiment_id, action.request_id)
        if known is not None:
            trial_id = known.id
            if known.pruned or known.state is TrialState.COMPLETED:
                self._report_exit(known, ExitReason.COMPLETED)
                return
            # the experiment is continued: run the trial again, as a new task
            tasks = trial_rows.task_ids(self.connection, known)
            fresh = {"task_id": f"{tasks[0]}-{len(tasks)}", "state": TrialState.PAUSED, "ended": None, "restarts": 0}
            trial_rows.change(self.connection, trial_id, **fresh, progress=0.0, early_exit="", reason="")
        else:
            trial_id = self._add_trial(experiment, action)
        if experiment.state is ExperimentState.ACTIVE:
            self.apply_to_trial(trial_id, TrialSignal.START)

    def _why_not(self, trial: Trial) -> str | None:
        config = self.experiment_of(trial.experiment_id).config
        context = self._state.context_of(self.connection, trial.experiment_id)
        try:
            return pruning.reason(config, trial.hparams, context.files)
        except Exception:  # unknown: let the trial run and find out
            log.exception("a point of experiment %d could not be checked before launch", trial.experiment_id)
            return None

    def _add_trial(self, experiment: Experiment, action: Create) -> int:
        return trial_rows.add(
            self.connection,
            Trial(
                id=0,
                experiment_id=experiment.id,
                request_id=action.request_id,
                task_id=f"{experiment.id}.{action.request_id}",
                state=TrialState.ACTIVE if experiment.state is ExperimentState.ACTIVE else TrialState.PAUSED,
                hparams=action.hparams,
                seed=action.seed,
                created=self.now,
                warm_start_checkpoint=checkpoint_rows.source_of(self.connection, experiment.config),
            ),
        )

    # -- reading

    def trial_of(self, trial_id: int) -> Trial:
        return existing(trial_rows.get(self.connection, trial_id), f"trial {trial_id}")

    def experiment_of(self, experiment_id: int) -> Experiment:
        return existing(
            experiment_rows.get(self.connection, experiment_id, derived=False), f"experiment {experiment_id}"
        )
