"""Trials as jobs of an engine: this machine (`agent`), or several machines under an existing
scheduler (`slurm`, `ray`).

The master decides what starts next, from its own queue and the engine's slots. The engine decides
where: an allocation is a job of N nodes with M slots each, and the nodes are known once the job
runs. On each node, ``agent.node`` runs the trial as a Determined container would. It writes its
exit record and its log to the master's folder, which all nodes must share.

Jobs are named by the id of their allocation, so that a restarted master finds them. Every step can
be repeated after a restart of the master.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from zero_trial.errors import ConfigError, ZeroTrialError
from zero_trial.master import logs
from zero_trial.master.agent import resources, storage
from zero_trial.master.agent.environment import StartOrder, environment, with_package
from zero_trial.master.agent.resources import (
    KILLED_CODE,
    EngineBusy,
    Exit,
    Node,
    OrderQueue,
    Reports,
    is_passing,
    never_begun,
    numbered,
)
from zero_trial.master.directory import MasterDirectory
from zero_trial.util.files import write_atomic

SUBMITTED = "submitted.json"  # in the folder of an allocation that was submitted to the engine
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL of a trial's processes
_NODES_SECONDS = 3.0  # between two polls of the machines
_UNLISTED_SECONDS = 10.0  # maximum delay until the engine lists a new job
_LAG_SECONDS = 70.0  # maximum delay until a file written by a node is visible here: acdirmax of nfs(5) is 60
_PEERS_SECONDS = 5.0  # how long the other nodes may keep running after one node has failed
_STUCK_SECONDS = 15.0  # after the grace period, until a job that does not end is killed
_LONGEST = 400  # maximum characters of job output to report if the trial did not start
ORDER = "order.json"
ERROR = "error   "  # prefix of the line in which a node reports why it cannot start


class JobEnd(Enum):
    """Why a job has ended, according to its engine."""

    DONE = "done"
    FAILED = "failed"
    CANCELED = "canceled"
    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"  # by the engine, for another job
    TIME_LIMIT = "time_limit"
    OUT_OF_MEMORY = "out_of_memory"
    UNKNOWN = "unknown"  # the engine does not know the job


@dataclass(frozen=True)
class JobStatus:
    """A job's state according to its engine: waiting (no nodes), running on ``nodes``, or ended."""

    nodes: tuple[str, ...] = ()  # in rank order
    end: JobEnd | None = None
    why: str = ""


@dataclass(frozen=True)
class ClusterJob:
    """A job for an engine: `command` on each of ``nodes`` nodes, with ``slots`` slots per node."""

    name: str
    folder: Path
    nodes: int
    slots: int
    kind: str
    pool: str
    avoid: tuple[str, ...] = ()  # names of machines to exclude
    options: Mapping[str, Any] = field(default_factory=dict)  # the experiment's section of this engine
    python: str = sys.executable
    cpus: int = 1  # per slot; 0: unknown
    numbers: tuple[int, ...] = ()  # the slots that the master has assigned

    @property
    def command(self) -> list[str]:
        """Return the command for each node; the engine appends the rank and the node's name."""
        return [self.python, "-m", "zero_trial.master.agent.node", str(self.folder)]

    @property
    def pythonpath(self) -> str:
        return with_package({})["PYTHONPATH"]


class ClusterEngine(Protocol):
    """Machines under one scheduler. Methods raise ZeroTrialError if it does not answer."""

    name: str
    seconds: float  # between two polls of its jobs
    remote: bool  # whether it runs jobs on other machines, which see the master's folder with a delay

    def nodes(self) -> list[Node]:
        """List the machines that can run trials, with the pool names of each machine."""

    def pools(self) -> tuple[str, ...]:
        """List the pools, the default pool first."""

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError if an experiment uses a feature that this engine does not support."""

    def submit(self, job: ClusterJob) -> None:
        """Queue a job; it starts once there is room."""

    def cancel(self, name: str, *, force: bool = False) -> None:
        """End a job: send SIGTERM and, with ``force`` or after a while, SIGKILL."""

    def statuses(self, names: Collection[str]) -> Mapping[str, JobStatus]:
        """Return the state of these jobs; jobs that the engine does not know are omitted."""

    def close(self) -> None:
        """Release the resources of this process; jobs keep running."""


def outcome(exits: Sequence[Exit | None], status: JobStatus, now: float, *, adopted: bool = False) -> Exit:
    """Return how an allocation ended.

    If all nodes exited successfully, the run succeeded, whatever happened later. A run that the
    engine or its machine ended resumes from its last checkpoint without counting a restart. If a
    machine was lost, report that instead of its peers' failures; else the node that failed first.

    Args:
        exits: the exit record of each node; None: no record.
        adopted: the job may have ended while no master ran. Engines forget such jobs (Slurm after
            ``MinJobAge``), so an unknown job may have been canceled, preempted or lost.
    """
    if not exits:
        return never_begun()
    ended = [one for one in exits if one is not None]
    if len(ended) == len(exits) and not any(one.code or one.killed for one in ended):
        return ended[0]
    where = f" ({', '.join(status.nodes)})" if status.nodes else ""
    if status.end in (JobEnd.NODE_LOST, JobEnd.PREEMPTED):
        what = "a machine was lost" if status.end is JobEnd.NODE_LOST else "the engine preempted the job"
        return Exit(KILLED_CODE, now, killed=True, why=f"{what}{where}{_because(status)}")
    failed = sorted((one for one in ended if one.code and not one.killed), key=lambda one: one.time)
    if status.end is JobEnd.TIME_LIMIT:
        return Exit(KILLED_CODE, now, why=f"the job reached its time limit{_because(status)}")
    if status.end is JobEnd.OUT_OF_MEMORY:
        return Exit(KILLED_CODE, now, why=f"the job exceeded its memory limit{where}")
    if failed:
        return failed[0]
    if len(ended) == len(exits):
        return next((one for one in ended if one.killed), ended[0])
    if status.end is JobEnd.CANCELED or any(one.killed for one in ended):
        return Exit(KILLED_CODE, now, killed=True, why=f"the job was canceled{_because(status)}")
    gone = "the engine no longer knows the job" if status.end is JobEnd.UNKNOWN else "the supervisor no longer exists"
    unseen = adopted and status.end is JobEnd.UNKNOWN
    return Exit(KILLED_CODE, now, killed=unseen, why=f"{gone}{where}{_because(status)}")


def _because(status: JobStatus) -> str:
    return f": {status.why}" if status.why else ""


@dataclass
class _Watched:
    """An allocation that the manager watches until it ends."""

    nodes: int
    since: float  # submitted or adopted, monotonic
    adopted: bool = False
    started: bool = False
    waits: str = ""  # the reported reason why it waits
    failed_at: float | None = None  # when a node failed while others kept running
    ended_at: float | None = None  # when the engine first reported the end
    kill_after: float | None = None
    matches_read: dict[Path, int] = field(default_factory=dict)  # bytes


class ClusterManager:
    """Starts and ends allocations as jobs of an engine, watches them and reports their progress."""

    def __init__(
        self,
        directory: MasterDirectory,
        engine: ClusterEngine,
        *,
        host_env: Mapping[str, str],
        grace: float = GRACE_SECONDS,
    ) -> None:
        self._directory = directory
        self._engine = engine
        self._host_env = host_env
        self._grace = grace
        self._orders = OrderQueue("the jobs")
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._look_at_nodes_at = 0.0  # monotonic
        self._nodes: tuple[Node, ...] = tuple(engine.nodes())
        kept = directory.root / "nodes.json"
        if engine.remote:
            known = json.loads(kept.read_text("utf-8")) if kept.exists() else []
            self._nodes = numbered([Node(name, slots, at, up=False) for name, slots, at in known], self._nodes)
        self._pools = engine.pools()

    def nodes(self) -> tuple[Node, ...]:
        """List the machines that are currently known."""
        return self._nodes

    def pools(self) -> tuple[str, ...]:
        """List the resource pools, the default pool first."""
        return self._pools

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError if an experiment uses a feature that is not supported here."""
        actions = [policy.action for policy in logs.policies_of(config)]
        if self._engine.remote and logs.EXCLUDE_NODE in actions:
            raise ConfigError(
                "is not supported on a cluster, where the engine chooses the nodes of each run",
                where="log_policies.action",
                got=logs.EXCLUDE_NODE,
                fix="Remove it, or disable the node: det agent disable NAME.",
            )
        self._engine.check(config)

    def begin(self, reports: Reports) -> None:
        self._orders.begin(lambda: self._look_at_all(reports), self._engine.seconds, reports.on_waiting)

    def start(self, order: StartOrder) -> None:
        """Queue the start of an allocation. No effect if an earlier master started it."""
        self._orders.put(order.allocation.id, lambda: self._start(order), begins=True)

    def kill(self, allocation_id: str) -> None:
        """Queue the end of all processes of an allocation."""
        self._orders.put(allocation_id, lambda: self._kill(allocation_id))

    def adopt(self, allocation_id: str) -> bool:
        """Watch an allocation if an earlier master started it; return whether it did."""
        folder = self._directory.allocation(allocation_id)
        if not (folder / SUBMITTED).exists() and not resources.lease_exists(folder):
            return False
        self._watch_from_now(allocation_id, adopted=True)
        return True

    def close(self) -> None:
        """Stop watching; running jobs continue."""
        self._orders.close()
        self._engine.close()

    # -- orders

    def _start(self, order: StartOrder) -> None:
        name = order.allocation.id
        folder = self._directory.allocation(name)
        # a lease without a submission means that the allocation was killed before it started
        if not resources.lease_exists(folder) and not (folder / SUBMITTED).exists():
            try:
                self._submit(order, folder)
            except Exception as error:
                if is_passing(error):
                    raise
                refuse(self._directory, order, error)
        self._watch_from_now(name)

    def _submit(self, order: StartOrder, folder: Path) -> None:
        """Write the files that the nodes read; submit the job unless the engine knows it."""
        taken = [node for node in self._nodes if any(slot in node.numbers for slot in order.allocation.slots)]
        kind = taken[0].kind if taken else "cpu"
        each = len(order.allocation.slots) // order.nodes
        pool = str((order.config.get("resources") or {}).get("resource_pool") or self._pools[0])
        there = [node.cpus for node in self._nodes if node.kind == kind and pool in node.pools]
        cpus = min(there, default=1)  # the engine chooses the nodes, so assume the smallest
        for rank in range(order.nodes):
            root = folder / f"node-{rank}" / "root"
            for path in (root / "run/determined/info", root / "run/determined/train/logs"):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            storage.link(order.config, root)
        content = {
            "env": environment(order, kind, self._host_env, sys.executable),
            "nodes": order.nodes,
            "slots": each,
            "slot_ids": list(range(each) if self._engine.remote else order.allocation.slots),
            "kind": kind,
            "threads": cpus,
            "command": steps(order.has_hook, rendezvous=order.nodes == 1),
            "grace": self._grace,
            "logs": str(self._directory.trial_logs(order.allocation.trial_id)),
            "run_id": order.allocation.run_id,
            "storage": storage.kept_in(order.config) if self._engine.remote else None,
            "policies": [asdict(policy) for policy in logs.policies_of(order.config)],
        }
        write_atomic(folder / ORDER, json.dumps(content), durable=False, private=True)
        try:
            known = order.allocation.id in self._engine.statuses([order.allocation.id])
        except ZeroTrialError as error:
            raise EngineBusy(f"the jobs could not be listed: {error}") from error
        if not known:
            options = order.config.get(self._engine.name) or {}
            disabled = tuple(node.name for node in self._nodes if node.name in order.avoid)
            shape = folder.name, folder, order.nodes, each, kind, pool
            numbers = order.allocation.slots
            self._engine.submit(ClusterJob(*shape, disabled, options, cpus=cpus, numbers=numbers))
        write_atomic(folder / SUBMITTED, json.dumps({"nodes": order.nodes}), durable=False)

    def _kill(self, name: str) -> None:
        folder = self._directory.allocation(name)
        if not (folder / SUBMITTED).exists():  # it has not started, and the void lease prevents a later start
            resources.forbid(folder, never_begun())
            self._watch_from_now(name)
            return
        with self._lock:
            watched = self._watched.get(name)
            if watched is not None and watched.kill_after is None:
                watched.kill_after = time.monotonic() + self._grace + _STUCK_SECONDS
        self._engine.cancel(name)

    def _watch_from_now(self, name: str, *, adopted: bool = False) -> None:
        with self._lock:
            folder = self._directory.allocation(name)
            nodes = len(list(folder.glob("node-*"))) if (folder / SUBMITTED).exists() else 0
            self._watched.setdefault(name, _Watched(nodes, time.monotonic(), adopted))

    # -- polling

    def _look_at_all(self, reports: Reports) -> None:
        if self._engine.remote and time.monotonic() >= self._look_at_nodes_at:
            self._look_at_nodes_at = time.monotonic() + _NODES_SECONDS
            self._orders.guarded("the machines", self._look_at_nodes, reports)
        with self._lock:
            watched = dict(self._watched)
        statuses = self._engine.statuses(list(watched)) if watched else {}
        for name, entry in watched.items():
            status = statuses.get(name)
            if status is None and entry.nodes and time.monotonic() - entry.since < _UNLISTED_SECONDS:
                continue  # the engine may not list the job yet
            status = status or JobStatus(end=JobEnd.UNKNOWN)
            self._orders.guarded(f"allocation {name}", self._look, name, entry, status, reports)

    def _look_at_nodes(self, reports: Reports) -> None:
        found = numbered(self._nodes, self._engine.nodes())
        if found == self._nodes and (self._directory.root / "nodes.json").exists():
            return
        kept = [(node.name, node.slots, node.first) for node in found]
        write_atomic(self._directory.root / "nodes.json", json.dumps(kept), durable=False)
        self._nodes = found
        reports.on_nodes_changed()

    def _look(self, name: str, entry: _Watched, status: JobStatus, reports: Reports) -> None:
        folder = self._directory.allocation(name)
        nodes = [folder / f"node-{rank}" for rank in range(entry.nodes)]
        if status.end is not None and self._engine.remote:
            for each in (folder, *nodes):
                storage.refresh_listing(each)
        if not entry.started and any(resources.lease_owner(node) is not None for node in nodes):
            reports.on_started(name, status.nodes)
            entry.started = True
        elif status.end is None and not status.nodes and status.why and status.why != entry.waits:
            reports.on_waiting(name, status.why)
            entry.waits = status.why
        now = time.monotonic()
        ended = resources.exit_of(folder) or self._ended(folder, entry, status, nodes)
        late = entry.kill_after is not None and now > entry.kill_after
        alone = entry.failed_at is not None and now - entry.failed_at > _PEERS_SECONDS
        if ended is None and (late or (alone and entry.kill_after is None)):
            self._engine.cancel(name, force=late)
            entry.kill_after = now + self._grace + _STUCK_SECONDS
        for node in nodes:
            matches, end = logs.read_matches(node, entry.matches_read.get(node, 0))
            for match in matches:
                reports.on_matched(name, match)
            entry.matches_read[node] = end  # if a report raises, the next poll repeats it
        if ended is None:
            return
        reports.on_exited(name, ended)  # if this raises, the next poll repeats it
        self._engine.cancel(name, force=True)  # releases remaining resources
        with self._lock:
            self._watched.pop(name, None)
        (folder / ORDER).unlink(missing_ok=True)  # it contains a token
        for node in nodes:
            for path in (node / "work", node / "root"):  # copies of the context
                shutil.rmtree(path, ignore_errors=True)

    def _ended(self, folder: Path, entry: _Watched, status: JobStatus, nodes: Sequence[Path]) -> Exit | None:
        """Return how a job has ended; None while it runs or an exit record may still arrive."""
        now = time.monotonic()
        exits = [resources.exit_of(node) for node in nodes]
        if status.end is None:
            if entry.failed_at is None and any(one is not None and one.code and not one.killed for one in exits):
                entry.failed_at = now
            entry.ended_at = None  # the engine lists the job again
            return None
        entry.ended_at = entry.ended_at or now
        # a job that the engine does not know may still start
        known = status.end is not JobEnd.UNKNOWN
        settled = [one is not None or (known and _cannot_begin(node)) for one, node in zip(exits, nodes, strict=True)]
        recorded = all(settled) or status.end in (JobEnd.NODE_LOST, JobEnd.PREEMPTED) or not self._engine.remote
        if not recorded and now - entry.ended_at < _LAG_SECONDS:
            return None
        if not entry.started and not any(exits) and status.end is JobEnd.FAILED:
            return Exit(127, time.time(), why=f"the job could not start: {why_not_begun(folder, status)}")
        gone = [name for name in status.nodes if not any(node.name == name and node.up for node in self._nodes)]
        if None in exits and gone:
            status = replace(status, end=JobEnd.NODE_LOST)
        return outcome(exits, status, time.time(), adopted=entry.adopted)


def _cannot_begin(node: Path) -> bool:
    """Return whether an ended job's part on one node can no longer start."""
    try:
        return resources.never_begins(node)
    except OSError:  # a full disk; no lease is needed, because the engine does not start an ended job again
        return True


def steps(has_hook: bool, *, rendezvous: bool = True) -> list[str]:
    """Return the command of a trial: the steps of a Determined container, as one shell.

    It downloads the context directory, runs the user's hook, waits for the other containers and
    launches. Without a hook, the two preparations share one process, which saves a second. Without
    ``rendezvous``, the containers have already met.
    """
    prepare = "python3 -m zero_trial.trial.runtime.determined prepare"
    first, meet = f"{prepare} --download_context_directory --resources --proxy", ""
    if rendezvous and has_hook:
        meet = f"{prepare} --rendezvous; "
    elif rendezvous:
        first = f"{first} --rendezvous"
    hook = ". ./startup-hook.sh; " if has_hook else ""
    script = f"set -e; {first}; {hook}{meet}exec python3 -m determined.exec.launch"
    return [shutil.which("bash") or "sh", "-c", script]


def refuse(directory: MasterDirectory, order: StartOrder, error: Exception) -> None:
    """Record that an allocation cannot be started, in its trial's log and as its exit."""
    run = order.allocation
    path = logs.path_of(directory.trial_logs(run.trial_id), run.run_id)
    foreseen = isinstance(error, (ZeroTrialError, OSError, ValueError))
    said = str(error) if foreseen else f"{type(error).__name__}: {error}"
    logs.append(path, [logs.entry(f"cannot start the trial: {said}", time.time(), "stderr", l="ERROR")])
    ended = Exit(127, time.time(), why=f"the trial could not be started: {said}")
    resources.forbid(directory.allocation(run.id), ended)


def why_not_begun(folder: Path, status: JobStatus) -> str:
    """Return why a job failed before the trial started, from the job's output: a node's error line
    if there is one, else the last lines.

    If the job was placed but printed nothing, its machines could not even write into the folder.
    """
    try:
        lines = (folder / "job.out").read_text("utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    known = next((line for line in lines if line.startswith(ERROR)), "")
    said = known.removeprefix(ERROR) or "; ".join(line.strip() for line in lines if line.strip())[-_LONGEST:]
    if said or not status.nodes:
        return said or status.why
    where = ", ".join(status.nodes)
    doubt = (
        f"nothing was written to {folder / 'job.out'}: is the master's folder shared with {where}, at the same path?"
    )
    return f"{status.why}; {doubt}" if status.why else doubt


def left_behind(directory: MasterDirectory) -> list[str]:
    """List the allocations that a master has submitted without recording their end."""
    return sorted(path.parent.name for path in directory.allocations.glob(f"*/{ORDER}"))


class _Ends:
    """Receives a manager's reports without a master; records the exits for the next master."""

    def __init__(self, directory: MasterDirectory) -> None:
        self._directory = directory
        self.names: set[str] = set()

    def on_nodes_changed(self) -> None: ...

    def on_waiting(self, allocation_id: str, why: str) -> None: ...

    def on_started(self, allocation_id: str, nodes: Sequence[str] = ()) -> None: ...

    def on_matched(self, allocation_id: str, match: logs.LogMatch) -> None: ...

    def on_exited(self, allocation_id: str, ended: Exit) -> None:
        folder = self._directory.allocation(allocation_id)
        if not resources.forbid(folder, ended) and resources.exit_of(folder) is None:
            resources.record_exit(folder, ended)
        self.names.add(allocation_id)


def cancel_all(
    directory: MasterDirectory, engine: ClusterEngine, seconds: float = 100.0, grace: float = GRACE_SECONDS
) -> tuple[list[str], list[str]]:
    """End all jobs that a master has left behind, without a master. Return the allocations that ran
    and have ended, and the allocations that did not end within ``seconds``."""
    left = left_behind(directory)
    ran = [name for name, status in engine.statuses(left).items() if status.end is None]
    manager, ends = ClusterManager(directory, engine, host_env={}, grace=grace), _Ends(directory)
    for name in left:
        manager.adopt(name)
    manager.begin(ends)
    for name in left:
        manager.kill(name)
    until = time.monotonic() + seconds
    while not ends.names.issuperset(left) and time.monotonic() < until:
        time.sleep(0.05)
    manager.close()
    return [name for name in ran if name in ends.names], [name for name in left if name not in ends.names]
