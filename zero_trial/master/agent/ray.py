"""Ray as the engine of a master: an allocation is a placement group with one bundle for each node,
and an actor in each bundle runs the node's part.

A slot is a GPU of Ray's, or on nodes without GPUs some of its CPUs. Ray itself is imported in a
process of its own, `ray_driver`.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from zero_trial.errors import ConfigError, MasterError
from zero_trial.master.agent.agent import with_package
from zero_trial.master.agent.cluster import ClusterJob, JobEnd, JobStatus
from zero_trial.master.agent.resources import POOL, EngineBusy, Node

_PREFIX = "zt-"  # of the names of placement groups and actors
_ID = 6  # characters of a node's id in its name: machines may have several nodes
_BEGIN_SECONDS = 60.0  # that a driver may take to import Ray and to join the cluster
_ANSWER_SECONDS = 20.0  # that it may take for an answer


def name_of(node: Mapping[str, Any]) -> str:
    """Return the name of a node: its machine's, and the beginning of its id."""
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:_ID]}"


def nodes_in(found: Sequence[Mapping[str, Any]], *, cpus: int, gpus: bool) -> list[Node]:
    """Read ``ray.nodes()``. Nodes without GPUs are left out if another one has some.

    Args:
        cpus: the CPUs of a slot on the CPU.
        gpus: whether GPUs are looked at.
    """
    nodes = []
    for node in found:
        resources = node["Resources"]
        graphics = int(resources.get("GPU", 0)) if gpus else 0
        slots = graphics or int(resources.get("CPU", 0)) // cpus
        if slots and node["Alive"]:
            kind, each = ("cuda", int(resources.get("CPU", 0)) // graphics) if graphics else ("cpu", cpus)
            nodes.append(Node(name_of(node), slots, kind=kind, address=node["NodeManagerAddress"], cpus=each))
    graphic = [node for node in nodes if node.kind == "cuda"]
    return sorted(graphic or nodes, key=lambda node: node.name)


def request_of(job: ClusterJob, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the request that starts a job.

    Args:
        nodes: ``ray.nodes()``, for the ids of those that the job avoids.
    """
    amount = {"GPU": float(job.slots)} if job.kind == "cuda" else {"CPU": float(max(1, job.slots) * job.cpus)}
    avoided = [node["NodeID"] for node in nodes if name_of(node) in job.avoid and node["Alive"]]
    return {
        "op": "submit",
        "name": _PREFIX + job.name,
        "bundles": [amount] * job.nodes,
        "labels": {"ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else {},
        "command": job.command,
        "pythonpath": job.pythonpath,
        "output": str(job.folder / "job.out"),
    }


def status_of(seen: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> JobStatus:
    """Return a job's state from what the driver has seen of it.

    Args:
        seen: the state of its placement group, the ids of its nodes, and for each node the exit
            code, the reason why its actor is gone, or None while it runs. ``lost``: an actor of an
            earlier driver is gone, which only ends before its command does if its node is lost.
        nodes: ``ray.nodes()``.
    """
    known = {node["NodeID"]: node for node in nodes}
    places = [known.get(number) for number in seen["nodes"]]
    names = tuple(
        f"?-{number[:_ID]}" if node is None else name_of(node)
        for number, node in zip(seen["nodes"], places, strict=True)
    )
    codes = seen["codes"]
    if not seen["nodes"]:
        if seen["canceled"]:
            return JobStatus(end=JobEnd.CANCELED)
        if seen["lost"]:
            return JobStatus(end=JobEnd.NODE_LOST, why="Ray: its actor is gone")
        return JobStatus(why="Ray has no room for its placement group yet")
    gone = [name for name, node in zip(names, places, strict=True) if node is None or not node["Alive"]]
    if gone:
        return JobStatus(names, JobEnd.NODE_LOST, f"Ray: node {', '.join(gone)} is dead")
    if None in codes:
        return JobStatus(names)
    broken = [code for code in codes if isinstance(code, str)]
    if seen["canceled"]:
        return JobStatus(names, JobEnd.CANCELED)
    if broken:
        return JobStatus(names, JobEnd.FAILED, f"Ray: {broken[0]}")
    return JobStatus(names, JobEnd.FAILED if any(codes) else JobEnd.DONE)


class RayEngine:
    """The engine: each method is a request to the driver; one that has ended is started again."""

    name = "ray"
    seconds = 0.5

    def __init__(self, address: str, *, cpus: int = 1, gpus: bool = True, env: Mapping[str, str]) -> None:
        self._address = address
        self._cpus = cpus
        self._gpus = gpus
        self._env = with_package(env)
        self._lock = threading.Lock()  # one request at a time
        self._driver: subprocess.Popen[str] | None = None

    def nodes(self) -> list[Node]:
        return nodes_in(self._ask({"op": "nodes"}), cpus=self._cpus, gpus=self._gpus)

    def pools(self) -> tuple[str, ...]:
        return (POOL,)

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse nothing: no section of an experiment is Ray's."""

    def submit(self, job: ClusterJob) -> None:
        self._ask(request_of(job, self._ask({"op": "nodes"})))

    def cancel(self, name: str, *, force: bool = False) -> None:
        self._ask({"op": "cancel", "name": _PREFIX + name, "force": force})

    def statuses(self, names: Collection[str]) -> Mapping[str, JobStatus]:
        # first the jobs, so that a node that dies in between is known to be dead
        seen = self._ask({"op": "look", "names": [_PREFIX + name for name in names]})
        nodes = self._ask({"op": "nodes"})
        return {name.removeprefix(_PREFIX): status_of(each, nodes) for name, each in seen.items()}

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request to the driver and return its answer. Raises MasterError."""
        with self._lock:
            if self._driver is None or self._driver.poll() is not None:
                self._begin()
            return self._exchange(json.dumps(request) + "\n", _ANSWER_SECONDS)

    def _begin(self) -> None:
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "zero_trial.master.agent.ray_driver", self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._env,
        )
        self._exchange("", _BEGIN_SECONDS)

    def _exchange(self, line: str, seconds: float) -> Any:
        """Send a line, unless it is empty, and return the answer. Raises MasterError; a driver that
        does not answer in time is ended.
        """
        driver = self._driver
        if driver is None or driver.stdin is None or driver.stdout is None:
            raise MasterError("the driver of Ray does not run", where="--on ray")
        late = False
        try:
            driver.stdin.write(line)
            driver.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(driver.stdout, selectors.EVENT_READ)
                late = not selector.select(seconds)
            if late:
                driver.kill()  # jobs go on without it
            said = driver.stdout.readline()
        except OSError as error:
            raise EngineBusy("the driver of Ray has ended", where="--on ray", got=str(error)) from error
        why = f"its driver did not answer in {seconds:.0f} s" if late else "its driver has ended"
        found = json.loads(said) if said else {"error": why}
        if "error" not in found:
            return found["answer"]
        where = f"--on ray={self._address or 'auto'}"
        if not line or not said:
            self._end()
            raise EngineBusy("Ray does not answer", where=where, got=found["error"])
        raise MasterError("Ray has refused a request", where=where, got=found["error"])

    def _end(self) -> None:
        if self._driver is not None and self._driver.stdin is not None:
            with suppress(OSError):  # of what it did not read
                self._driver.stdin.close()  # it ends with its input
            try:
                self._driver.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._driver.kill()
                self._driver.wait()
            self._driver = None


def require_ray() -> None:
    """Raise ConfigError if Ray is not installed here."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed", where="--on ray", fix="pip install 'zero_trial[ray]'")
