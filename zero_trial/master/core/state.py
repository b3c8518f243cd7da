"""The master's one lock and what is behind it: the store, the searches, the agent; every change of state passes here.

Nothing that waits is done under the lock: processes are started and ended by the agent's thread, files are deleted by the janitor's.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zero_trial
from zero_trial.master import logs
from zero_trial.master.agent.agent import AgentApi, LeaseState
from zero_trial.master.agent.devices import SlotDevices
from zero_trial.master.agent.lease import Exit
from zero_trial.master.core import trial_lifecycle as trial_life
from zero_trial.master.core.search import Context, LiveSearch, new_searcher, old_searcher, read_context
from zero_trial.master.core.transaction import Transaction
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import AllocationState, Experiment, MasterInfo
from zero_trial.master.store import Database, accounts, experiments, trials

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
DETERMINED_VERSION = "0.38.1"
"""The version that clients are told: they compare it with their own."""


class MasterState:
    """Everything that the verbs share. ``workers`` is set before ``begin``."""

    def __init__(self, home: MasterDirectory, devices: SlotDevices, *, clock: Callable[[], float] = time.time) -> None:
        self.home = home
        self.devices = devices
        self.clock = clock
        self.database = Database(home.database)
        self.lock = threading.RLock()
        self.signaled = threading.Condition()  # somebody was asked to stop, or has ended
        self.chores = threading.Event()  # there is something to delete
        self.searches: dict[int, LiveSearch] = {}
        self.workers: AgentApi
        self.master_url = ""
        self.agent_id = "this-machine"
        self.serving = False  # slots are given out
        self.began = clock()
        self.info = self._identity()
        self._contexts: dict[int, Context] = {}
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None

    def begin(self, master_url: str) -> None:
        """Take over what a master before us left, then give out slots. ``master_url`` is told to the trials."""
        self.master_url = master_url
        with self.change() as change:
            self.serving = True
            for run in trials.allocations(change.connection):
                if run.state is AllocationState.QUEUED:
                    continue
                if self.workers.adopt(run.id) is LeaseState.NOTHING:
                    change.runs.order_start(run)
                if trials.killing(change.connection, run.id):
                    name = run.id
                    change.orders.append(lambda name=name: self.workers.kill(name))  # type: ignore[misc]
            change.queue_changed = True
        self.chores.set()

    def start_ticking(self) -> None:
        """Look for what is overdue, in a thread of its own."""
        self._ticker = threading.Thread(target=self._tick_on, name="ticker", daemon=True)
        self._ticker.start()

    @contextmanager
    def change(self) -> Iterator[Transaction]:
        """Change something: all or nothing, and what follows from it."""
        with self.lock:
            change: Transaction | None = None
            try:
                with self.database.transaction() as connection:
                    change = Transaction(self, connection, self.clock())
                    yield change
                    change.settle()
                    for (
                        trial_id,
                        level,
                        line,
                    ) in change.notes:  # before the end of a trial can be seen: who follows its log reads them
                        self.note(trial_id, line, level)
            except BaseException:
                # The searchers have moved on while the store has not: they are made again from the store.
                for experiment_id in change.touched if change is not None else ():
                    self.searches.pop(experiment_id, None)
                raise
            for order in change.orders:
                order()
        self._after(change)

    def _after(self, change: Transaction) -> None:
        if change.signal:
            with self.signaled:
                self.signaled.notify_all()
        if change.chores:
            self.chores.set()

    def note(self, trial_id: int, line: str, level: str = "INFO") -> None:
        """A line of the master's own in a trial's log."""
        path = logs.path_of(self.home.trial_logs(trial_id), logs.MASTER)
        try:
            logs.append(path, [logs.entry(line, self.clock(), "stderr", l=level)])
        except OSError as error:  # a line less must not undo what it is about
            log.warning("trial %d: %s (not in its log: %s)", trial_id, line, error)

    # -- what the agent and the clock say

    def on_started(self, allocation_id: str) -> None:
        """Its processes run."""
        with self.change() as change:
            run = trials.allocation(change.connection, allocation_id)
            if run is not None and run.state is AllocationState.STARTING:
                trials.change_allocation(change.connection, allocation_id, state=AllocationState.RUNNING)

    def on_exited(self, allocation_id: str, ended: Exit) -> None:
        """Its processes are gone."""
        with self.change() as change:
            run = trials.allocation(change.connection, allocation_id)
            if run is None or run.state is AllocationState.TERMINATED:
                return
            code, why = ended.code, ended.why
            level = "INFO" if code == 0 else "ERROR"
            change.notes.append(
                (run.trial_id, level, f"run {run.run_id} ended with exit code {code}" + (f": {why}" if why else ""))
            )
            change.trial(run.trial_id, trial_life.Exited(code, why, killed=ended.killed))

    def tick(self) -> None:
        """End what should have ended by now."""
        now = self.clock()
        with self.database.reading() as connection:
            late = trials.overdue(connection, now)
        for run in late:
            with self.change() as change:
                fresh = trials.allocation(change.connection, run.id)
                if fresh is None or fresh.state is AllocationState.TERMINATED:
                    continue
                trials.change_allocation(change.connection, run.id, deadline=None)
                change.notes.append((run.trial_id, "WARNING", f"run {run.run_id} did not end in time"))
                change.trial(run.trial_id, trial_life.Overdue())

    def _tick_on(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            try:
                self.tick()
            except Exception:
                log.exception("the clock stumbled")

    def stop_runs(self, seconds: float = 60.0) -> None:
        """End all running allocations, to be run again by the next master from their checkpoints; waits until they are gone."""
        self.serving = False
        with self.change() as change:
            for run in trials.allocations(change.connection):
                if run.state is not AllocationState.QUEUED:
                    change.trial(run.trial_id, trial_life.Overdue())
        until = time.monotonic() + seconds
        while self._running() and time.monotonic() < until:
            with self.signaled:
                self.signaled.wait(0.2)

    def _running(self) -> bool:
        with self.database.reading() as connection:
            return any(run.state is not AllocationState.QUEUED for run in trials.allocations(connection))

    def close(self) -> None:
        """Nothing is lost without it."""
        self.serving = False
        self._closed.set()
        with self.signaled:
            self.signaled.notify_all()
        if self._ticker is not None:
            self._ticker.join()
        with self.lock:
            self.database.close()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    # -- what is kept between events

    def search_of(self, connection: sqlite3.Connection, experiment: Experiment) -> LiveSearch:
        """The live search of an experiment, made from the store if it is not there."""
        live = self.searches.get(experiment.id)
        if live is None:
            snapshot = experiments.snapshot(connection, experiment.id)
            searcher = old_searcher(experiment.config, snapshot) if snapshot else new_searcher(experiment.config)
            live = self.searches[experiment.id] = LiveSearch(searcher, self.context_of(connection, experiment.id))
        return live

    def context_of(self, connection: sqlite3.Connection, experiment_id: int) -> Context:
        """What the master reads of an experiment's context directory."""
        if experiment_id not in self._contexts:
            self._contexts[experiment_id] = read_context(experiments.context(connection, experiment_id) or b"")
        return self._contexts[experiment_id]

    def keep_context(self, experiment_id: int, context: Context) -> None:
        """What was read already need not be read again."""
        self._contexts[experiment_id] = context

    def forget(self, experiment_id: int) -> None:
        """Drop what is kept of an experiment."""
        self.searches.pop(experiment_id, None)
        self._contexts.pop(experiment_id, None)

    def _identity(self) -> MasterInfo:
        """Random, and the same for as long as the store is."""
        with self.database.transaction() as connection:
            ids = []
            for key in ("master_id", "cluster_id"):
                known = accounts.value(connection, key)
                if known is None:
                    known = str(uuid.uuid4())
                    accounts.set_value(connection, key, known)
                ids.append(known)
        return MasterInfo(
            version=DETERMINED_VERSION,
            master_id=ids[0],
            cluster_id=ids[1],
            cluster_name=f"zero_trial {zero_trial.__version__}",
        )
