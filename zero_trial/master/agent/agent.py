"""This machine as an engine: a job is a process in its own session that supervises the trial,
outlives the master and leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from zero_trial.master.agent import resources, storage
from zero_trial.master.agent.cluster import ClusterJob, JobEnd, JobStatus
from zero_trial.master.agent.environment import MARK, SlotDevices, with_package
from zero_trial.master.agent.resources import POOL, Node
from zero_trial.master.directory import MasterDirectory
from zero_trial.util import process_tree

THIS_MACHINE = "this-machine"  # the name of the only node


class ThisMachine:
    """Starts and ends jobs as processes of this machine, marked with the job's name.

    The lease identifies a started process, also for the next master.
    """

    name, seconds, remote = "", 0.1, False

    def __init__(self, directory: MasterDirectory, devices: SlotDevices, *, host_env: Mapping[str, str]) -> None:
        self._directory = directory
        self._devices = devices
        self._host_env = host_env
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # started by this process
        self._canceled: set[str] = set()

    def nodes(self) -> list[Node]:
        devices = self._devices
        return [Node(THIS_MACHINE, devices.count, kind=devices.kind, gpus=devices.gpus, cpus=devices.threads)]

    def pools(self) -> tuple[str, ...]:
        return (POOL,)

    def check(self, config: Mapping[str, Any]) -> None:
        """Accept every experiment."""

    def submit(self, job: ClusterJob) -> None:
        storage.make_scratch(self._node(job.name), self._host_env)  # if the disk is full, the job waits
        mine = {MARK: job.name, "CUDA_VISIBLE_DEVICES": self._devices.visible(job.numbers), "SLURM_CPUS_PER_TASK": ""}
        with (job.folder / "job.out").open("ab") as output:
            self._children[job.name] = subprocess.Popen(
                [*job.command, "0", THIS_MACHINE],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=str(job.folder),
                env=with_package({**self._host_env, **mine}),
                start_new_session=True,
            )

    def cancel(self, name: str, *, force: bool = False) -> None:
        """End a job. A job that has not started is killed immediately."""
        self._canceled.add(name)
        owner = resources.lease_owner(self._node(name))
        if owner is None or force:
            process_tree.send(process_tree.marked(MARK, name), signal.SIGKILL)
        else:
            owner.send(signal.SIGTERM)

    def statuses(self, names: Collection[str]) -> Mapping[str, JobStatus]:
        found = {name: self._status(name) for name in names}
        return {name: status for name, status in found.items() if status is not None}

    def close(self) -> None:
        """Do nothing: jobs keep running."""

    def _node(self, name: str) -> Path:
        return self._directory.allocation(name) / "node-0"

    def _status(self, name: str) -> JobStatus | None:
        """Return a job's status; remove leftover processes and files of a job that has ended."""
        child, folder = self._children.get(name), self._node(name)
        code = None if child is None else child.poll()  # reaps the child
        owner = resources.lease_owner(folder)
        runs = owner.alive if owner is not None else child is not None and code is None
        if runs or (owner is None and child is None and process_tree.marked(MARK, name)):
            return JobStatus()
        if owner is None and child is None:
            return None
        process_tree.sweep(MARK, name)
        storage.remove_scratch(folder, name)  # a killed supervisor could not remove it
        if owner is not None and owner.before_boot and resources.exit_of(folder) is None:
            return JobStatus(end=JobEnd.NODE_LOST, why="the machine was restarted")
        why = "" if code is None or owner is not None else f"exit code {code}"
        return JobStatus(end=JobEnd.CANCELED if name in self._canceled else JobEnd.FAILED, why=why)
