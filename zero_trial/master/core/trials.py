"""Trials, their tasks and allocations: queries, reports, and long-polling requests."""

from __future__ import annotations

import heapq
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

from zero_trial.master import logs
from zero_trial.master.core import lifecycle
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import Transaction, transaction
from zero_trial.master.logs import LogLine, LogMatcher, LogQuery, policies_of
from zero_trial.master.records import (
    Allocation,
    AllocationState,
    Checkpoint,
    Conflict,
    Experiment,
    ExperimentState,
    Invalid,
    Json,
    MetricReport,
    Task,
    Trial,
    TrialState,
    existing,
    parse_time,
)
from zero_trial.master.store import checkpoint_rows, experiment_rows, trial_rows
from zero_trial.master.store import metric_rows as metrics

_INVALID_HP = ("INVALID_HP", "INIT_INVALID_HP")
_LOOK_SECONDS = 1.0  # seconds; a waiting request checks its condition at least this often
LOST_SECONDS = 300.0  # seconds without a heartbeat
_UNMANAGED_STATES = {
    "ACTIVE": TrialState.ACTIVE,
    "RUNNING": TrialState.ACTIVE,
    "PAUSED": TrialState.PAUSED,
    "COMPLETED": TrialState.COMPLETED,
    "CANCELED": TrialState.CANCELED,
    "ERROR": TrialState.ERROR,
}


class TrialService:
    """Reads and kills single trials, and stores their reports."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- reading

    def get(self, trial_id: int, *, derived: bool = True) -> Trial:
        """Return a trial. ``derived``: with validations and summary. Raises NotFound."""
        return existing(self._state.read(trial_rows.get, trial_id, derived=derived), f"trial {trial_id}")

    def workloads(
        self, trial_id: int, kinds: Sequence[str] | None = None, *, include_batch_metrics: bool = False
    ) -> tuple[int, Iterator[MetricReport | Checkpoint]]:
        """Return the number of a trial's reports and checkpoints, and an iterator over them in
        order of steps completed, without archived reports.

        Args:
            kinds: training, validation, checkpoint; None means all.
        """
        self.get(trial_id, derived=False)
        opened = self._state.database.reading
        kinds = kinds or ("training", "validation", "checkpoint")
        groups = [kind for kind in kinds if kind != "checkpoint"]
        saved = self._state.read(checkpoint_rows.of_trial, trial_id) if "checkpoint" in kinds else []
        with opened() as connection:
            total = len(saved) + sum(metrics.count(connection, trial_id, group) for group in groups)
        parts: list[Iterable[MetricReport | Checkpoint]] = [
            *(metrics.of_trial(opened, trial_id, group, batch_metrics=include_batch_metrics) for group in groups),
            sorted(saved, key=attrgetter("steps_completed")),
        ]
        return total, heapq.merge(*parts, key=lambda item: item.steps_completed or 0)

    def metrics(self, trial_id: int, group: str | None = None) -> Iterator[MetricReport]:
        """Yield the reports of a group (None: all groups), without archived reports."""
        self.get(trial_id, derived=False)
        return metrics.of_trial(self._state.database.reading, trial_id, group, batch_metrics=True)

    def logs(self, trial_id: int, query: LogQuery) -> Iterator[LogLine | None]:
        """Return the lines of all runs of a trial; the iterator may be dropped at any time.

        With ``follow``, yields each line within half a second after it was written, and None after
        one to two seconds without a line, so that the caller can check whether its reader is still
        connected.
        """
        return _read_logs(self._state, self.get(trial_id, derived=False), query)

    # -- changing

    def kill(self, trial_id: int) -> None:
        """Kill a trial: canceled for its search. Raises Conflict if active and unmanaged."""
        with transaction(self._state) as tx:
            trial = tx.trial_of(trial_id)
            if trial.state is TrialState.ACTIVE:
                require_managed(tx.experiment_of(trial.experiment_id))
            tx.apply_to_trial(trial_id, lifecycle.TrialSignal.KILL)

    def change(self, trial_id: int, **columns: Any) -> None:
        """Set columns of a trial: ``metadata``, or ``runner_state`` (phase of the harness)."""
        with transaction(self._state) as tx:
            tx.trial_of(trial_id)
            trial_rows.change(tx.connection, trial_id, **columns)

    # -- reports

    def report_metrics(
        self,
        trial_id: int,
        *,
        run_id: int,
        group: str,
        steps_completed: int | None,
        metrics: Json,
        batch_metrics: Any = None,
        reported: float | None = None,
    ) -> None:
        """Store a report of metrics; pass a validation on to the search. Raises Invalid if the run
        id is stale.

        This is cheap: a report is readable immediately, and on disk within a tenth of a second (a
        validation: before this returns).
        """
        with transaction(self._state) as tx:
            newest, before, unmanaged = existing(trial_rows.reached(tx.connection, trial_id), f"trial {trial_id}")
            if run_id != newest:
                raise Invalid(
                    "this run is not the trial's latest", where=f"trial {trial_id}", got=run_id, expected=newest
                )
            at = tx.now if reported is None else reported
            report = MetricReport(trial_id, run_id, group, steps_completed, metrics, batch_metrics, at)
            self._add(tx, report, unmanaged=unmanaged)
            steps = steps_completed if group in ("training", "validation") else None
            if steps is not None and steps > before:
                trial_rows.change(tx.connection, trial_id, steps_completed=steps)

    def _add(self, tx: Transaction, report: MetricReport, *, unmanaged: bool) -> None:
        if unmanaged and report.run_id > 1 and report.steps_completed is not None:
            # an unmanaged run can start at any step: its reports void earlier ones
            metrics.archive_repeated(tx.connection, report)
        if report.steps_completed is not None and metrics.known(tx.connection, report):
            return  # a repeated report, because the response was lost: the search already has it
        if report.group != "validation":
            metrics.add(tx.connection, report)
            return
        trial = tx.trial_of(report.trial_id)
        config = experiment_rows.config(tx.connection, trial.experiment_id) or {}
        name = str((config.get("searcher") or {}).get("metric"))
        metrics.add(tx.connection, report, metrics.number_of(report.metrics, name))
        tx.search(trial.experiment_id, lambda search: search.on_validation(trial.request_id, report.metrics), trial.id)

    def report_progress(self, trial_id: int, progress: float) -> None:
        """Record the progress of a trial, and recompute the progress of its search.

        Args:
            progress: a fraction of this trial's own work from 0 to 1.
        """
        fraction = min(1.0, max(0.0, progress))
        with transaction(self._state) as tx:
            trial = tx.trial_of(trial_id)
            trial_rows.change(tx.connection, trial_id, progress=fraction)
            number = trial.experiment_id
            found = experiment_rows.state_of(tx.connection, number)
            if found is None or found[0].final:
                return
            if found[1]:
                experiment_rows.change(tx.connection, number, progress=fraction)
                return
            fractions = trial_rows.progress_of_live(tx.connection, number)
            progress = self._state.search_of(tx.connection, number).progress(fractions)
            experiment_rows.change(tx.connection, number, progress=progress)

    def early_exit(self, trial_id: int, reason: str) -> None:
        """Record that a trial is going to exit early.

        Args:
            reason: Determined's name for the reason, for example EXITED_REASON_INVALID_HP.
        """
        word = reason.removeprefix("EXITED_REASON_")
        with transaction(self._state) as tx:
            tx.trial_of(trial_id)
            tx.apply_to_trial(trial_id, lifecycle.EarlyExit(lifecycle.INVALID_HP if word in _INVALID_HP else word))

    def start_run(self, trial_id: int) -> None:
        """Accept the announcement that a rank will report (``POST /runs/start``; runId is the
        trial's id). Raises Conflict if the trial has ended."""
        trial = self.get(trial_id, derived=False)
        if trial.state.final:
            raise Conflict(f"trial {trial_id} is {trial.state.value}")


@dataclass(frozen=True)
class _StoredSource(logs.Source):
    """The logs of a trial, with the ids of its runs read from the store."""

    state: MasterState

    def names(self, run_id: int, node: int = 0) -> dict[str, str]:
        run = self.state.read(trial_rows.run_of_trial, self.trial_id, run_id)
        if run_id == logs.MASTER or run is None:
            return super().names(run_id)
        names = [each.name for each in self.state.nodes_of(run.slots)] or [""]
        ids = {"task_id": run.task_id, "allocation_id": run.id, "container_id": run.container_id}
        return {**ids, "agent_id": names[min(node, len(names) - 1)]}


def _read_logs(state: MasterState, trial: Trial, query: LogQuery) -> Iterator[LogLine | None]:
    """Return an iterator over the log lines of a trial, or of one of its tasks."""
    folder = state.directory.trial_logs(trial.id)
    source = _StoredSource(folder, trial.id, query.task_id or trial.task_id, state)
    if not query.follow:
        state.wait_for_notes()
        return logs.lines(source, query)

    def ended() -> bool:
        if state.closed.is_set():
            return True
        found = state.read(trial_rows.get, trial.id)
        over = found is None or found.state.final or query.task_id not in ("", found.task_id)
        if over:
            state.wait_for_notes()
        return over

    return logs.follow(source, query, ended)


class TaskService:
    """Reads tasks and their allocations, and stores the reports of allocations."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # -- reading

    def task(self, task_id: str) -> Task:
        """Return a task. Raises NotFound."""
        with self._state.database.reading() as connection:
            trial = existing(trial_rows.of_task(connection, task_id), f"task {task_id}")
            number = trial.experiment_id
            experiment = existing(experiment_rows.get(connection, number, derived=False), f"experiment {number}")
            return self._task(connection, trial, task_id, experiment)

    def tasks(self) -> list[Task]:
        """List the tasks that have an allocation that has not ended."""
        with self._state.database.reading() as connection:
            experiment = cache(partial(experiment_rows.get, connection, derived=False))
            ids = dict.fromkeys((run.trial_id, run.task_id) for run in trial_rows.allocations(connection))
            found = [(trial_rows.get(connection, trial_id), task_id) for trial_id, task_id in ids]
            return [
                self._task(connection, trial, task_id, existing(experiment(trial.experiment_id), "its experiment"))
                for trial, task_id in found
                if trial is not None
            ]

    def _task(self, connection: sqlite3.Connection, trial: Trial, task_id: str, experiment: Experiment) -> Task:
        all_runs = trial_rows.allocations(connection, trial_id=trial.id)
        runs = [run for run in all_runs if run.task_id == task_id]
        first, current = not all_runs or all_runs[0].task_id == task_id, trial.task_id == task_id
        return Task(
            id=task_id,
            trial_id=trial.id,
            experiment_id=trial.experiment_id,
            name=f"Trial {trial.id} (Experiment {trial.experiment_id})",
            owner=experiment.owner,
            started=trial.created if first or not runs else runs[0].created,
            ended=trial.ended if current else runs[-1].ended,
            allocations=tuple(runs),
            resources=experiment.config.get("resources") or {},
        )

    def allocation(self, allocation_id: str) -> Allocation:
        """Return an allocation. Raises NotFound."""
        return existing(self._state.read(trial_rows.allocation, allocation_id), f"allocation {allocation_id}")

    def context(self, task_id: str) -> bytes:
        """Return the context directory of the task's experiment as .tar.gz."""
        trial = self._trial(task_id)
        return self._state.read(experiment_rows.context, trial.experiment_id) or b""

    def logs(self, task_id: str, query: LogQuery) -> Iterator[LogLine | None]:
        """Return the log lines of a task, and the master's own lines about its trial."""
        return _read_logs(self._state, self._trial(task_id), replace(query, task_id=task_id))

    def _trial(self, task_id: str) -> Trial:
        return existing(self._state.read(trial_rows.of_task, task_id), f"task {task_id}")

    # -- reports and waiting requests of an allocation

    def preemption_signal(self, allocation_id: str, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for a preemption; return whether there is one."""
        until = time.monotonic() + timeout
        while True:
            # hold the lock, so that no signal arrives between the check and the wait
            with self._state.signaled:
                found = self.allocation(allocation_id)
                left = until - time.monotonic()
                if (
                    found.preempt
                    or found.state is AllocationState.TERMINATED
                    or left <= 0
                    or self._state.closed.is_set()
                ):
                    return found.preempt
                self._state.signaled.wait(min(left, _LOOK_SECONDS))

    def all_gather(self, allocation_id: str, request: str, peers: int, data: Any, timeout: float) -> list[Any]:
        """Return the data of all ``peers`` in order of arrival, once each peer has sent its own. A
        repeated request of a peer counts once.

        Raises Conflict if the other peers have not arrived within ``timeout`` seconds, or if the
        allocation has ended (the peer then retries). Raises Invalid if there are fewer containers.
        """
        until = time.monotonic() + timeout
        there = len(self._state.nodes_of(self.allocation(allocation_id).slots))
        if peers > there:
            raise Invalid("the allocation has fewer containers", where="numPeers", got=peers, expected=there)
        with self._state.signaled:
            rounds = self._state.gathered.setdefault(allocation_id, [])
            known = next((sent for _, sent in rounds if request in sent), None)
            if known is None and (not rounds or len(rounds[-1][1]) == rounds[-1][0]):
                # keep the last round: this peer has its data, but others may not
                rounds[:] = [*rounds[-1:], (peers, {})]
            sent = rounds[-1][1] if known is None else known
            sent[request] = data
            self._state.signaled.notify_all()
            while len(sent) < peers:
                left = until - time.monotonic()
                ended = self.allocation(allocation_id).state is AllocationState.TERMINATED
                if left <= 0 or ended or self._state.closed.is_set():
                    raise Conflict(f"{len(sent)} of {peers} containers have arrived", fix="Repeat the request.")
                self._state.signaled.wait(min(left, _LOOK_SECONDS))
            return list(sent.values())

    def ack_preemption(self, allocation_id: str) -> None:
        """Record that the allocation will end because it was preempted."""
        with transaction(self._state) as tx:
            run = existing(trial_rows.allocation(tx.connection, allocation_id), f"allocation {allocation_id}")
            newest = trial_rows.newest_allocation(tx.connection, run.trial_id)
            if newest is not None and newest.id == run.id:
                tx.apply_to_trial(run.trial_id, lifecycle.TrialSignal.ACKED)

    def append_logs(self, task_id: str, lines: Sequence[Json]) -> None:
        """Append log lines that were sent over HTTP instead of printed.

        Args:
            lines: dicts with log, and optionally timestamp, level, rankId (a checked int), stdtype.
        """
        trial = self._trial(task_id)
        path = logs.path_of(self._state.directory.trial_logs(trial.id), trial.run_id)
        entries = []
        for line in lines:
            more: dict[str, str | int] = {}
            if line.get("level"):
                more["l"] = str(line["level"]).removeprefix("LOG_LEVEL_")
            if line.get("rankId") is not None:
                more["r"] = line["rankId"]
            stamp = line.get("timestamp")
            at = parse_time(str(stamp), "timestamp") if stamp else self._state.clock()
            text, kind = str(line.get("log", "")).rstrip("\n"), str(line.get("stdtype") or "stdout")
            entries.append(logs.entry(text, at, kind, **more))
        logs.append(path, entries)
        config = self._state.read(experiment_rows.config, trial.experiment_id) or {}
        matches = LogMatcher(policies_of(config)).match([str(line.get("log", "")) for line in lines])
        if matches:
            with transaction(self._state) as tx:
                run = trial_rows.newest_allocation(tx.connection, trial.id)
                if run is not None:  # an unmanaged trial has no run
                    for match in matches:
                        tx.add_log_match(run, match)


# -- trials of processes that this master did not start


def require_managed(experiment: Experiment) -> None:
    """Raise Conflict for an unmanaged experiment: this master does not run its trials."""
    if experiment.unmanaged:
        raise Conflict(f"experiment {experiment.id} is unmanaged", fix="End the script that reports to it.")


@dataclass(frozen=True)
class StartedRun:
    """A run of an unmanaged trial, and the checkpoint that it resumes from."""

    run_id: int
    latest_checkpoint: str | None
    steps_completed: int


class UnmanagedService:
    """Creates unmanaged trials, and stores their states and heartbeats.

    Unmanaged trials are processes that this master did not start and that report their own state,
    as ``determined.experimental.core_v2`` does in a user's script. They have no allocations, slots
    or search. An active trial sends a heartbeat every minute; after five minutes without a
    heartbeat, the trial ends as failed. The state of an unmanaged experiment is derived from the
    states of its trials.
    """

    def __init__(self, state: MasterState) -> None:
        self._state = state

    def create(self, experiment_id: int, hparams: Mapping[str, Any], external_id: str | None = None) -> Trial:
        """Create a trial that waits to be started. If ``external_id`` is known, return that trial
        unchanged. Raises NotFound or Conflict."""
        with transaction(self._state) as tx:
            experiment = tx.experiment_of(experiment_id)
            _require_unmanaged(experiment)
            known = (
                None if external_id is None else trial_rows.of_external_id(tx.connection, experiment_id, external_id)
            )
            name = str(uuid.uuid4()) if external_id is None else external_id
            made = Trial(
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
            )
            number = known.id if known is not None else trial_rows.add(tx.connection, made)
        return self._get(number)

    def start(self, trial_id: int, *, resume: bool) -> StartedRun:
        """Begin a run of a trial; every run after the first resumes from the newest checkpoint.

        Raises NotFound, or Conflict (also if the trial was started before and ``resume`` is False).
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
        """Record a heartbeat, and the state if given. Raises NotFound, Invalid or Conflict."""
        with transaction(self._state) as tx:
            _, experiment = self._own(tx, trial_id)
            changes: dict[str, Any] = {"last_activity": tx.now}
            if state is not None:
                if state not in _UNMANAGED_STATES:
                    raise Invalid(
                        "not a state of an unmanaged trial", got=state[:60], expected=", ".join(_UNMANAGED_STATES)
                    )
                changes["state"] = _UNMANAGED_STATES[state]
                changes["ended"] = tx.now if _UNMANAGED_STATES[state].final else None
                metrics.keep_summary(tx.connection, trial_id)
            trial_rows.change(tx.connection, trial_id, **changes)
            _settle(tx, experiment)
        return self._get(trial_id)

    def end_silent(self) -> None:
        """End the active trials without a heartbeat for five minutes of this master's uptime."""
        now = self._state.clock()
        if now < self._state.began + LOST_SECONDS:
            return  # this master was not up yet: heartbeats may have been lost
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


def _require_unmanaged(experiment: Experiment) -> None:
    if not experiment.unmanaged:
        raise Conflict(f"experiment {experiment.id} is managed", expected="an unmanaged experiment")
    if experiment.state is ExperimentState.DELETING:
        raise Conflict(f"experiment {experiment.id} is being deleted")


def _settle(tx: Transaction, experiment: Experiment) -> None:
    """Update an experiment's state from the states of its trials."""
    known = trial_rows.of_experiment(tx.connection, experiment.id)
    state = lifecycle.unmanaged_state([trial.state for trial in known])
    if state is experiment.state:
        return
    ends = [trial.ended for trial in known if trial.ended is not None]
    changes: dict[str, Any] = {"state": state, "ended": max(ends, default=tx.now) if state.final else None}
    if state is ExperimentState.COMPLETED:
        changes["progress"] = 1.0
    experiment_rows.change(tx.connection, experiment.id, **changes)
