"""The machine and its queue: slots, agent, resource pool, jobs."""

from __future__ import annotations

from pathlib import Path

from zero_trial.master.core.lifecycle import QueuedRun, queue_order
from zero_trial.master.core.state import MasterState
from zero_trial.master.core.transaction import transaction
from zero_trial.master.records import (
    AgentInfo,
    Allocation,
    AllocationState,
    Experiment,
    ExperimentState,
    Job,
    MasterInfo,
    NotFound,
    ResourcePool,
    SlotInfo,
)
from zero_trial.master.store import accounts, experiments, trials

POOL = "default"
_LIVE = (
    ExperimentState.ACTIVE,
    ExperimentState.PAUSED,
    ExperimentState.STOPPING_COMPLETED,
    ExperimentState.STOPPING_CANCELED,
    ExperimentState.STOPPING_KILLED,
    ExperimentState.STOPPING_ERROR,
)


class MachineService:
    """Operations on the machine and its queue."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    def info(self) -> MasterInfo:
        """Return version and identity."""
        return self._state.info

    def log_file(self) -> Path:
        """Return the path of the master's own log.

        An entry is one line, ``2026-01-31T12:00:00.000Z LEVEL message``; other lines belong to the
        entry before them.
        """
        return self._state.directory.log

    def slots(self) -> list[SlotInfo]:
        """List all slots."""
        devices = self._state.devices
        with self._state.database.reading() as connection:
            holders = {slot: run.id for run in trials.allocations(connection) for slot in run.slots}
            off = accounts.disabled_slots(connection)
        return [
            SlotInfo(
                number=number,
                device_type=devices.kind,
                name=f"GPU {devices.gpus[number]}" if devices.gpus else f"CPU process {number}",
                uuid=f"{devices.kind}-{number}",
                allocation_id=holders.get(number),
                enabled=number not in off,
            )
            for number in range(devices.count)
        ]

    def agents(self) -> list[AgentInfo]:
        """Return this machine as the only agent."""
        return [AgentInfo(self._state.agent_id, tuple(self.slots()), self._state.began, POOL, self._state.info.version)]

    def set_slot_enabled(self, number: int, enabled: bool) -> SlotInfo:
        """Let a slot be assigned, or no longer; a run that holds it keeps it. Raises NotFound."""
        if not 0 <= number < self._state.devices.count:
            raise NotFound(f"slot {number} not found")
        with transaction(self._state) as tx:
            accounts.enable_slot(tx.connection, number, enabled)
            tx.queue_changed = True
        return self.slots()[number]

    def jobs(self) -> list[Job]:
        """List the experiments that have not ended, in the order of the queue."""
        with self._state.database.reading() as connection:
            runs = trials.allocations(connection)
            found = [
                experiments.get(connection, number, derived=False) for number in experiments.ids(connection, *_LIVE)
            ]
        there = {experiment.id: experiment for experiment in found if experiment is not None}
        queued = [
            QueuedRun.of(run, there[run.experiment_id].config.get("resources") or {})
            for run in runs
            if run.state is AllocationState.QUEUED and run.experiment_id in there
        ]
        order = list(dict.fromkeys(item.experiment_id for item in queue_order(queued)))
        jobs = [
            _job(experiment, [run for run in runs if run.experiment_id == number], order)
            for number, experiment in there.items()
        ]
        return sorted(jobs, key=lambda job: (job.state != "SCHEDULED", job.priority, job.experiment_id))

    def resource_pools(self) -> list[ResourcePool]:
        """Return the only pool."""
        slots = self.slots()
        used = sum(slot.allocation_id is not None for slot in slots)
        return [ResourcePool(POOL, "the slots of this machine", self._state.devices.kind, len(slots), used)]


def _job(experiment: Experiment, runs: list[Allocation], order: list[int]) -> Job:
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
    )
