"""Real clusters of two nodes with two slots each on this machine, for the tests of masters on them:
Slurm's daemons, started by hand, and Ray's. A small trial on them, and the loss of its node."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.master.det import Det, until
from tests.trial.runtime.line_model import FILES, experiment
from zero_trial.checkpoint.range_reader import CheckpointReader
from zero_trial.util import process_tree

SECONDS = 60.0
NODES = ("n1", "n2")

SLURM_CONF = """
ClusterName=zt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=sched_min_interval=0,sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdTimeout=4
MessageTimeout=4
KillWait=2
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=second Nodes=n2 MaxTime=INFINITE State=UP
"""


# A node that is gone is seen within two seconds.
RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster(Protocol):
    """A cluster on this machine."""

    on: str  # of `zero-trial master up --on`

    def nodes(self) -> list[str]:
        """The names of the nodes that are up, as the engine gives them."""

    def lose(self, node: str, *, told: bool = False) -> None:
        """SIGKILL all processes of a node, those of its jobs included. ``told``: an engine that
        takes long to notice is told of it."""

    def restore(self, node: str) -> None:
        """Let a lost node, or another in its place, come back."""


class SlurmCluster:
    """slurmctld and two slurmd without munge, in a folder; SLURM_CONF is in the environment."""

    on = "slurm"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.conf = folder / "slurm.conf"

    def start(self) -> None:
        ports = free_ports(3)
        for name in ("state", *NODES):
            (self._folder / name).mkdir(parents=True)
        names = {"host": socket.gethostname(), "user": pwd.getpwuid(os.getuid()).pw_name, "folder": self._folder}
        self.conf.write_text(SLURM_CONF.format(port=ports[0], port1=ports[1], port2=ports[2], **names))
        self._run("slurmctld", "-i")
        for node in NODES:
            self.restore(node)
        until(lambda: self.nodes() == list(NODES), "the nodes do not come up")

    def nodes(self) -> list[str]:
        lines = self._run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t").splitlines()
        return sorted(line.split()[0] for line in lines if line.split()[1] in ("idle", "mix", "alloc"))

    def lose(self, node: str, *, told: bool = False) -> None:
        kill(self._processes(node))
        if told:
            self._run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def restore(self, node: str) -> None:
        self._run("slurmd", "-N", node)

    def stop(self) -> None:
        for node in NODES:
            self.lose(node)
        kill([int((self._folder / "slurmctld.pid").read_text())])

    def _processes(self, node: str) -> list[int]:
        """The daemon, the processes of its steps (they have the node's log open), and what these
        have started."""
        daemon, log = self._folder / f"{node}.pid", str(self._folder / f"{node}.log")
        found = [int(daemon.read_text())] if daemon.exists() else []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if any(os.readlink(file) == log for file in (process / "fd").iterdir()):
                    found.append(int(process.name))
        return list(dict.fromkeys([*found, *(child for pid in found for child in process_tree.descendants(pid))]))

    def _run(self, *words: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout


@contextmanager
def slurm(folder: Path) -> Iterator[SlurmCluster]:
    """Slurm until the block ends; skips the test where it is not installed."""
    paths = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name, path=paths) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: apt-get install slurmctld slurmd slurm-client")
    cluster = SlurmCluster(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()


class RayCluster:
    """A head without slots and two nodes, each a raylet of its own."""

    def __init__(self, slots: int = 2) -> None:
        from ray.cluster_utils import Cluster

        few = {"object_store_memory": 80 << 20}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **few})
        self._add = lambda: self._cluster.add_node(wait=False, num_cpus=slots, **few)
        self._nodes = [self._add() for _ in NODES]
        self.on = f"ray={self._cluster.address}"

    def nodes(self) -> list[str]:
        return sorted(self._name(node) for node in self._nodes)

    def lose(self, node: str, *, told: bool = False) -> None:
        [lost] = [each for each in self._nodes if self._name(each) == node]
        [raylet] = lost.all_processes["raylet"]
        kill([raylet.process.pid, *process_tree.descendants(raylet.process.pid)])
        self._nodes.remove(lost)
        self._cluster.remove_node(lost, allow_graceful=False)

    def restore(self, node: str) -> None:
        self._nodes.append(self._add())

    def stop(self) -> None:
        self._cluster.shutdown()

    def _name(self, node: Any) -> str:
        return f"{socket.gethostname()}-{node.node_id[:6]}"


@contextmanager
def ray(folder: Path, slots: int = 2) -> Iterator[RayCluster]:
    """Ray until the block ends; skips the test where it is not installed."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'zero_trial[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        cluster = RayCluster(slots)
        try:
            yield cluster
        finally:
            cluster.stop()


ENGINES: dict[str, Callable[[Path], AbstractContextManager[Cluster]]] = {"slurm": slurm, "ray": ray}

SPEAKS = 'import os\nprint("one of", os.environ.get("WORLD_SIZE"), "ranks", flush=True)\n'


def submit(det: Det, slots: int, **hyperparameters: Any) -> int:
    """``det experiment create``; the experiment's number, which is its trial's too. A trial of one
    slot is a process without a launcher."""
    context = det.folder / "line"
    context.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (context / name).write_text(text + SPEAKS if name == "model_def.py" else text)
    resources, seed = {"slots_per_trial": slots}, {"experiment_seed": 7}
    config = {
        **experiment("module" if slots > 1 else "class", **hyperparameters),
        "resources": resources,
        "reproducibility": seed,
    }
    file = det.folder / "line.yaml"
    file.write_text(json.dumps({**config, "max_restarts": 0}))
    out = det.ok("experiment", "create", str(file), str(context))
    return int(out.rpartition("Created experiment ")[2].split()[0])


def places(det: Det, trial: int) -> list[list[str]]:
    """The nodes of each run, as the master has said in the trial's log."""
    return [sorted(names.split(", ")) for names in re.findall(r"run \d+ runs on (.+)", det.logs(trial))]


def results(det: Det, trial: int) -> dict[str, Any]:
    """What must be bit-identical: every report in its order, and the files of the last
    checkpoint's model."""
    found = det.json("trial", "describe", str(trial), "--metrics")["workloads"]
    reports = {
        kind: [(w[kind]["totalBatches"], w[kind]["metrics"]["avgMetrics"]) for w in found if w.get(kind)]
        for kind in ("training", "validation")
    }
    last = max((w["checkpoint"] for w in found if w.get("checkpoint")), key=lambda one: int(one["totalBatches"]))
    manifest = CheckpointReader(det.root / "storage" / last["uuid"] / "model0").manifest
    return {**reports, "files": {name: record.sha256 for name, record in manifest.files.items()}}


def lose_one(
    det: Det, cluster: Cluster, name: str, slots: int, whole: dict[str, Any], *, told: bool = False
) -> dict[str, float]:
    """Lose the node of a trial in the middle of a step; it goes on on the other node to the bits of
    ``whole``, the results of one that is not disturbed. Then the node comes back.

    If ``whole`` is empty such a trial runs before, and its results are put into it. Returns seconds
    from the loss until the master has noticed it, the next run has begun, and the trial has ended.
    """
    gate = det.folder / name
    lost = submit(det, slots, wait_at=6, wait_for=str(gate))
    calm = None if whole else submit(det, slots)
    det.wait_for_line(lost, "waits at its gate")
    [[node]] = places(det, lost)
    if calm is not None:
        assert det.wait(calm) == "COMPLETED", det.logs(calm)
        whole |= results(det, calm)
    begin = time.monotonic()
    cluster.lose(node, told=told)
    gate.touch()
    det.wait_for_line(lost, "a machine was lost")
    noticed = time.monotonic() - begin
    until(lambda: len(places(det, lost)) == 2, "it is not started again")
    again = time.monotonic() - begin
    assert det.wait(lost) == "COMPLETED", det.logs(lost)
    ended = time.monotonic() - begin
    assert places(det, lost)[1] != [node] and det.trials(lost)[0]["restarts"] == 0
    assert "resumed at step 4" in det.logs(lost)
    assert results(det, lost) == whole
    cluster.restore(node)
    until(lambda: len(cluster.nodes()) == len(det.json("agent", "list")) == 2, "it does not come back")
    return {"noticed": noticed, "again": again, "ended": ended}


def kill(pids: list[int]) -> None:
    """SIGKILL at one moment, as the loss of a machine: none sees another one end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        process_tree.send(pids, number)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
