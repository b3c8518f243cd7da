"""The state that all parts of the master share: the store, the live searches, the agent, the clock
and the lock.

Never block while holding the lock: the agent's thread starts and ends processes, and the garbage
collector's thread deletes files.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import zero_trial
from zero_trial.master import logs
from zero_trial.master.agent.cluster import ClusterManager
from zero_trial.master.agent.resources import Node
from zero_trial.master.core.context_archive import Context, read_context
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.records import MasterInfo, Trial, existing
from zero_trial.master.search.searcher import Searcher, build, restore
from zero_trial.master.store import Database, experiment_rows

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

_DETERMINED_VERSION = "0.38.1"
"""The version that the master reports: Determined's clients compare it with their own version."""


class MasterState:
    """Objects that all services and transactions of a master share: store, searches, agent, lock.

    ``master_url`` is the address that is passed to trials; "" until it is known.
    """

    def __init__(
        self,
        directory: MasterDirectory,
        agent: ClusterManager,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self.agent = agent
        self.clock = clock
        self.database = Database(directory.database)
        self.lock = threading.RLock()
        self.signaled = threading.Condition()  # a run was asked to stop, or has ended
        self.has_garbage = threading.Event()
        self.searches: dict[int, Searcher] = {}  # by experiment, in the state after the last event
        self.waiting: dict[str, str] = {}  # by allocation: why the queued run waits, as logged
        self.submitted: set[str] = set()  # runs that wait in the queue of a cluster engine, under `lock`
        self.master_url = ""
        # by allocation: (peers, data by request) of each all-gather, under `signaled`
        self.gathered: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.serving = False  # whether slots are assigned
        self.closed = threading.Event()
        self.began = clock()
        self.info = self._identity()
        self.contexts: dict[int, Context] = {}  # cache, by experiment

    def read(self, query: Callable[Concatenate[sqlite3.Connection, P], R], *args: P.args, **options: P.kwargs) -> R:
        """Return the result of one store query, for example ``read(experiments.get, 3)``."""
        with self.database.reading() as connection:
            return query(connection, *args, **options)

    def nodes_of(self, slots: Sequence[int]) -> list[Node]:
        """Return the nodes of these slots in rank order; the first node if ``slots`` is empty."""
        known = self.agent.nodes()
        return [node for node in known if any(slot in node.numbers for slot in slots)] or list(known[:1])

    def log_to_trial(self, trial_id: int, line: str, level: str = "INFO") -> None:
        """Append a line from the master to a trial's log."""
        path = logs.path_of(self.directory.trial_logs(trial_id), logs.MASTER)
        try:
            logs.append(path, [logs.entry(line, self.clock(), "stderr", l=level)])
        except OSError as error:  # a failed log write must not undo the change that the line describes
            log.warning("trial %d: %s (not in its log: %s)", trial_id, line, error)

    def wait_for_notes(self) -> None:
        """Wait until the trial logs contain the lines of every visible change. This works because a
        transaction holds the lock from its commit until its lines are written."""
        with self.lock:
            pass

    def allocations_of(self, trial: Trial) -> str:
        """Return the prefix of a trial's allocation ids; the run's number follows.

        These ids name files in /tmp, so they must be unique across masters. Task ids are not
        unique: request ids are derived from the seed.
        """
        return f"{trial.task_id}.{self.info.cluster_id[:8]}"

    # -- caches

    def search_of(self, connection: sqlite3.Connection, experiment_id: int) -> Searcher:
        """Return the search of an experiment; restore it from the store if it is not cached."""
        if experiment_id not in self.searches:
            config = existing(experiment_rows.config(connection, experiment_id), f"experiment {experiment_id}")
            self.searches[experiment_id] = searcher_of(config, experiment_rows.snapshot(connection, experiment_id))
        return self.searches[experiment_id]

    def context_of(self, connection: sqlite3.Connection, experiment_id: int) -> Context:
        """Return the parts of an experiment's context directory that the master reads."""
        if experiment_id not in self.contexts:
            self.contexts[experiment_id] = read_context(experiment_rows.context(connection, experiment_id) or b"")
        return self.contexts[experiment_id]

    def forget(self, experiment_id: int) -> None:
        """Drop the cached search and context of an experiment."""
        self.searches.pop(experiment_id, None)
        self.contexts.pop(experiment_id, None)

    def _identity(self) -> MasterInfo:
        """Return random ids that stay the same for the lifetime of the store."""
        with self.database.transaction() as connection:
            for key in ("master_id", "cluster_id"):
                connection.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, str(uuid.uuid4())))
            ids = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        return MasterInfo(
            version=_DETERMINED_VERSION,
            master_id=ids["master_id"],
            cluster_id=ids["cluster_id"],
            cluster_name=f"zero_trial {zero_trial.__version__}",
        )


def searcher_of(config: Mapping[str, Any], snapshot: Mapping[str, Any] | None = None) -> Searcher:
    """Build the searcher of a completed config: restored from ``snapshot``, or not yet started."""
    section, space = config["searcher"], config.get("hyperparameters") or {}
    if snapshot:
        return restore(section, space, snapshot)
    return build(section, space, int((config.get("reproducibility") or {}).get("experiment_seed", 0)))
