"""The master of one machine: its services and the events from outside (agent reports, clock ticks,
start and stop).

A `Master` groups its operations into nine services (`experiments`, `workspaces`, `trials`,
`unmanaged`, `tasks`, `checkpoints`, `registry`, `machine`, `accounts`). All methods are
thread-safe. Rejected requests raise the ServiceErrors of `master.records`. `master.http` checks
permissions; only ownership is checked here. List methods return all rows, oldest first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from zero_trial.master import logs
from zero_trial.master.agent.cluster import ClusterManager
from zero_trial.master.agent.resources import POOL, Exit, Node, moved
from zero_trial.master.core import lifecycle
from zero_trial.master.core.accounts import AccountService
from zero_trial.master.core.checkpoints import CheckpointService, GarbageCollector
from zero_trial.master.core.experiments import ExperimentService
from zero_trial.master.core.lifecycle import QueuedRun, queue_order
from zero_trial.master.core.registry import RegistryService, WorkspaceService
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import transaction
from zero_trial.master.core.trials import TaskService, TrialService, UnmanagedService
from zero_trial.master.directory import MasterDirectory
from zero_trial.master.logs import LogMatch
from zero_trial.master.records import (
    AgentInfo,
    Allocation,
    AllocationState,
    Experiment,
    ExperimentState,
    Job,
    NotFound,
    ResourcePool,
    SlotInfo,
)
from zero_trial.master.store import experiment_rows, trial_rows, user_rows

log = logging.getLogger(__name__)
_FAILED = "resources failed with non-zero exit code"  # Determined's message; users' scripts search logs for it

_TICK_SECONDS = 0.5
_LIVE = (
    ExperimentState.ACTIVE,
    ExperimentState.PAUSED,
    ExperimentState.STOPPING_COMPLETED,
    ExperimentState.STOPPING_CANCELED,
    ExperimentState.STOPPING_KILLED,
    ExperimentState.STOPPING_ERROR,
)


class MachineService:
    """Describes the machine and its queue.

    Attributes:
        info: version and identity.
        log_file: the path of the master's own log. An entry starts with ``2026-01-31T12:00:00.000Z
            LEVEL message``; lines without this prefix belong to the previous entry.
    """

    def __init__(self, state: MasterState) -> None:
        self._state = state
        self.info = state.info
        self.log_file = state.directory.log

    def slots(self) -> list[SlotInfo]:
        """List all slots of the machines that are up."""
        return [slot for agent in self.agents() for slot in agent.slots]

    def agents(self) -> list[AgentInfo]:
        """Return one agent for each machine that is up."""
        with self._state.database.reading() as connection:
            holders = {slot: run.id for run in trial_rows.allocations(connection) for slot in run.slots}
            off = user_rows.disabled_slots(connection)
        return [
            AgentInfo(
                node.name,
                tuple(_slot(node, number, holders.get(number), off) for number in node.numbers),
                self._state.began,
                node.pools,
                self._state.info.version,
                node.address,
            )
            for node in self._up()
        ]

    def nodes_of(self, run: Allocation) -> list[str]:
        """Return the names of the machines that hold a run's slots."""
        return [node.name for node in self._state.nodes_of(run.slots)]

    def _up(self) -> list[Node]:
        return [node for node in self._state.agent.nodes() if node.up]

    def set_slot_enabled(self, number: int, enabled: bool, *, drain: bool = False) -> SlotInfo:
        """Enable or disable a slot for assignment.

        Disabling a slot evicts its run, which continues from its last checkpoint when it is
        scheduled again. With ``drain``, the run keeps the slot until it ends. Raises NotFound.
        """
        if not any(number in node.numbers for node in self._up()):
            raise NotFound(f"slot {number} not found")
        self._set_enabled({number}, enabled, drain, "slot disabled")
        return next(slot for slot in self.slots() if slot.number == number)

    def set_agent_enabled(self, name: str, enabled: bool, *, drain: bool = False) -> AgentInfo:
        """Enable or disable all slots of a machine (the only one: also runs without slots)."""
        node = next((node for node in self._up() if node.name == name), None)
        if node is None:
            raise NotFound(f"agent {name[:60]!r} not found")
        alone = len(self._up()) == 1
        self._set_enabled(set(node.numbers), enabled, drain, "agent disabled", slotless=alone)
        return next(agent for agent in self.agents() if agent.id == name)

    def _set_enabled(self, numbers: set[int], enabled: bool, drain: bool, why: str, *, slotless: bool = False) -> None:
        with transaction(self._state) as tx:
            for number in numbers:
                user_rows.enable_slot(tx.connection, number, enabled, draining=drain)
            for run in trial_rows.allocations(tx.connection) if not enabled and not drain else ():
                holds = bool(numbers.intersection(run.slots)) or (slotless and not run.slots)
                if run.state is not AllocationState.QUEUED and holds:
                    tx.note(
                        run.trial_id,
                        "WARNING",
                        f"{why}: run {run.run_id} ends, and continues when it is scheduled again",
                    )
                    tx.apply_to_trial(run.trial_id, lifecycle.TrialSignal.EVICTED)
            tx.reschedule()

    def jobs(self) -> list[Job]:
        """List the experiments that have not ended, in queue order."""
        with self._state.database.reading() as connection:
            runs = trial_rows.allocations(connection)
            places = user_rows.workspaces_of_projects(connection)
            there = {each.id: each for each in experiment_rows.in_states(connection, *_LIVE) if not each.unmanaged}
        queued = [
            QueuedRun.of(run, there[run.experiment_id].config.get("resources") or {})
            for run in runs
            if run.state is AllocationState.QUEUED and run.experiment_id in there
        ]
        order = list(dict.fromkeys(item.experiment_id for item in queue_order(queued)))
        own: dict[int, list[Allocation]] = {}
        for run in runs:
            own.setdefault(run.experiment_id, []).append(run)
        jobs = [
            _job(experiment, own.get(number, []), order, places[experiment.project_id])
            for number, experiment in there.items()
        ]
        return sorted(jobs, key=lambda job: (job.state != "SCHEDULED", job.priority, job.experiment_id))

    def job(self, experiment_id: int) -> Job | None:
        """Return the job of an experiment; None if the experiment has ended or is unmanaged."""
        return next((job for job in self.jobs() if job.experiment_id == experiment_id), None)

    def resource_pools(self) -> list[ResourcePool]:
        """Return the resource pools, the default pool first."""
        agents, names = self.agents(), self._state.agent.pools()
        members = {name: [agent for agent in agents if name in agent.resource_pools] for name in names}
        found = []
        for name, its in members.items():
            slots = [slot for agent in its for slot in agent.slots]
            used = sum(slot.allocation_id is not None for slot in slots)
            what = "the slots of this machine" if names == (POOL,) and len(its) == 1 else f"{len(its)} machines"
            kind = slots[0].device_type if slots else "cpu"
            found.append(ResourcePool(name, what, kind, len(slots), used, len(its), name == names[0]))
        return found


def _slot(node: Node, number: int, holder: str | None, off: Mapping[int, bool]) -> SlotInfo:
    place = number - node.first
    gpu = node.gpus[place] if node.gpus else place
    return SlotInfo(
        number=number,
        device_type=node.kind,
        name=f"GPU {gpu}" if node.kind == "cuda" else f"CPU process {place}",
        uuid=f"{node.kind}-{number}",
        allocation_id=holder,
        enabled=number not in off,
        draining=off.get(number, False),
    )


def _job(experiment: Experiment, runs: list[Allocation], order: list[int], workspace_id: int) -> Job:
    resources = experiment.config.get("resources") or {}
    slots = resources.get("slots_per_trial")
    running = [run for run in runs if run.state is not AllocationState.QUEUED]
    priority, weight = resources.get("priority"), resources.get("weight")
    return Job(
        id=experiment.job_id,
        experiment_id=experiment.id,
        name=experiment.name,
        owner=experiment.owner,
        submitted=experiment.created,
        priority=42 if priority is None else int(priority),
        weight=1.0 if weight is None else float(weight),
        state="SCHEDULED" if running else "QUEUED",
        requested_slots=len(runs) * (1 if slots is None else int(slots)),
        allocated_slots=sum(len(run.slots) for run in running),
        jobs_ahead=order.index(experiment.id) if experiment.id in order and not running else 0,
        progress=experiment.progress,
        workspace_id=workspace_id,
        pool=resources.get("resource_pool") or POOL,
    )


class Master:
    """Owns all services of one machine's master, and its threads.

    Call ``begin`` once the address is known, and ``close`` at the end. ``directory`` must already
    be prepared and locked.
    """

    def __init__(
        self,
        directory: MasterDirectory,
        agent: ClusterManager,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = state = MasterState(directory, agent, clock=clock)
        self.garbage_collector = GarbageCollector(state)
        self.experiments = ExperimentService(state)
        self.trials = TrialService(state)
        self.workspaces = WorkspaceService(state)
        self.unmanaged = UnmanagedService(state)
        self.tasks = TaskService(state)
        self.checkpoints = CheckpointService(state)
        self.registry = RegistryService(state)
        self.machine = MachineService(state)
        self.accounts = AccountService(state)
        self._ticker: threading.Thread | None = None

    def begin(self, master_url: str) -> None:
        """Take over the allocations of an earlier master, assign slots and start the threads."""
        self.take_over(master_url)
        self.state.agent.begin(self)
        self._ticker = threading.Thread(target=self._tick_on, name="ticker", daemon=True)
        self._ticker.start()
        self.garbage_collector.start()

    def take_over(self, master_url: str) -> None:
        """Repeat the orders that an earlier master may not have completed; assign slots."""
        state = self.state
        state.master_url, state.serving = master_url, True
        with transaction(state) as tx:
            for run in trial_rows.allocations(tx.connection):
                if run.state is AllocationState.QUEUED:
                    continue
                if not state.agent.adopt(run.id):
                    tx.order_start(run)
                if trial_rows.killing(tx.connection, run.id):
                    tx.order_kill(run.id)
            tx.reschedule()
        state.has_garbage.set()

    # -- reports of the agent and the clock

    def on_nodes_changed(self) -> None:
        """Assign slots again after a machine has joined or left."""
        with transaction(self.state) as tx:
            tx.reschedule()

    def on_waiting(self, allocation_id: str, why: str) -> None:
        """Log why a trial's run has not started yet; end the run if it was asked to stop."""
        with transaction(self.state) as tx:
            run = trial_rows.allocation(tx.connection, allocation_id)
            if run is not None and run.state is AllocationState.STARTING:
                self.state.submitted.add(allocation_id)
                tx.note(run.trial_id, "INFO", f"run {run.run_id} waits: {why}")
                if run.preempt:
                    tx.apply_to_trial(run.trial_id, lifecycle.TrialSignal.EVICTED)

    def on_started(self, allocation_id: str, nodes: Sequence[str] = ()) -> None:
        """Record that the processes of an allocation are running, and on which machines."""
        with transaction(self.state) as tx:
            run = trial_rows.allocation(tx.connection, allocation_id)
            if run is None or run.state is not AllocationState.STARTING:
                return
            self.state.submitted.discard(allocation_id)
            # set the start time only now: hours in an engine's queue do not count as run time
            trial_rows.change_allocation(
                tx.connection, allocation_id, state=AllocationState.RUNNING, started=self.state.clock()
            )
            there = [node for name in nodes for node in self.state.agent.nodes() if node.name == name]
            holders = {slot: other.id for other in trial_rows.allocations(tx.connection) for slot in other.slots}
            for name, slots in moved(allocation_id, run.slots, there, holders).items() if there else ():
                trial_rows.change_allocation(tx.connection, name, slots=slots)
            if nodes:
                tx.note(run.trial_id, "INFO", f"run {run.run_id} runs on {', '.join(nodes)}")

    def on_matched(self, allocation_id: str, match: LogMatch) -> None:
        """Record that a log policy has matched a line of an allocation."""
        with transaction(self.state) as tx:
            run = trial_rows.allocation(tx.connection, allocation_id)
            if run is not None:
                tx.add_log_match(run, match)

    def on_exited(self, allocation_id: str, ended: Exit) -> None:
        """Record that the processes of an allocation have ended, and advance its trial."""
        with transaction(self.state) as tx:
            run = trial_rows.allocation(tx.connection, allocation_id)
            if run is None or run.state is AllocationState.TERMINATED:
                return
            why = ended.why or ("" if ended.code == 0 or ended.killed else _FAILED)
            level = "ERROR" if why else "INFO"  # ERROR even if the run was asked to end, as on a cluster
            tx.note(run.trial_id, level, f"run {run.run_id} ended with exit code {ended.code}{why and f': {why}'}")
            matches = trial_rows.log_matches(tx.connection, run.task_id)
            end = lifecycle.Exited(
                ended.code,
                ended.why,
                killed=ended.killed,
                no_retry=logs.why_no_retry(matches),
                excluded=logs.why_excluded(matches, self.state.nodes_of(run.slots)[0].name),
            )
            tx.apply_to_trial(run.trial_id, end)
            self.state.submitted.discard(allocation_id)
        with self.state.signaled:
            self.state.gathered.pop(allocation_id, None)

    def tick(self) -> None:
        """Kill runs past their deadline, and end unmanaged trials that stopped reporting."""
        self.unmanaged.end_silent()
        late = self.state.read(trial_rows.overdue, self.state.clock())
        for run in late:
            with transaction(self.state) as tx:
                fresh = trial_rows.allocation(tx.connection, run.id)
                if fresh is None or fresh.state is AllocationState.TERMINATED:
                    continue
                trial_rows.change_allocation(tx.connection, run.id, deadline=None)
                tx.note(run.trial_id, "WARNING", f"run {run.run_id} did not end in time")
                tx.apply_to_trial(run.trial_id, lifecycle.TrialSignal.OVERDUE)

    def _tick_on(self) -> None:
        while not self.state.closed.wait(_TICK_SECONDS):
            try:
                self.tick()
            except Exception:
                log.exception("the check for overdue runs failed")

    # -- the end

    def stop_runs(self, seconds: float = 60.0) -> None:
        """End all running allocations; the next master resumes their trials."""
        self.state.serving = False
        with transaction(self.state) as tx:
            for run in trial_rows.allocations(tx.connection):
                if run.state is not AllocationState.QUEUED:
                    tx.apply_to_trial(run.trial_id, lifecycle.TrialSignal.EVICTED)
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(
            run.state is not AllocationState.QUEUED for run in self.state.read(trial_rows.allocations)
        ):
            with self.state.signaled:
                self.state.signaled.wait(0.2)

    def close(self) -> None:
        """Stop the threads and close the store. Running trials continue."""
        state = self.state
        state.agent.close()
        self.garbage_collector.close()
        state.serving = False
        state.closed.set()
        with state.signaled:
            state.signaled.notify_all()
        if self._ticker is not None:
            self._ticker.join()
        with state.lock:
            state.database.close()
