"""Ray as the master's engine: an allocation is a placement group with one bundle per node, and an
actor in each bundle runs the node's part.

A slot is a Ray GPU, or, on nodes without GPUs, a number of CPUs.

The master's `RayEngine` does not import Ray. It sends requests as JSON lines to a driver process
that runs ``python -m zero_trial.master.agent.ray ADDRESS``, because a Ray driver ends when the Ray
processes of its machine end. Jobs outlive the driver; the next driver finds them by name.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from zero_trial.errors import ConfigError, MasterError
from zero_trial.master.agent.cluster import ClusterJob, JobEnd, JobStatus
from zero_trial.master.agent.environment import with_package
from zero_trial.master.agent.resources import POOL, EngineBusy, Node

_PREFIX = "zt-"  # of placement group and actor names
_ID = 6  # characters of the node id in a node's name: a machine may run several nodes
_BEGIN_SECONDS = 60.0  # timeout for a driver to import Ray and join the cluster
_ANSWER_SECONDS = 20.0  # timeout for an answer of the driver
_STOP_SECONDS = 5.0
_RESULT_SECONDS = 0.2  # timeout for answers of actors; late answers are read at the next poll


def name_of(node: Mapping[str, Any]) -> str:
    """Return the name of a node: the machine's name and a prefix of the node id."""
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:_ID]}"


def nodes_in(found: Sequence[Mapping[str, Any]], *, cpus: int, gpus: bool) -> list[Node]:
    """Parse ``ray.nodes()``. Nodes without GPUs are omitted if any node has GPUs.

    Args:
        cpus: CPUs per CPU slot.
        gpus: whether to use GPUs.
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
        nodes: ``ray.nodes()``, to look up the ids of the nodes that the job avoids.
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
    """Return a job's status from the driver's observations.

    Args:
        seen: the ids of its nodes, and for each node the exit code, the reason why its actor is
            gone, or None while it runs. ``lost``: an actor of an earlier driver is gone; before its
            command ends, this happens only if its node is lost.
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
            return JobStatus(end=JobEnd.NODE_LOST, why="Ray: the actor no longer exists")
        return JobStatus(why="Ray has no room for the placement group yet")
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
    """The Ray engine: each method sends a request to the driver; an ended driver is restarted."""

    name, seconds, remote = "ray", 0.5, True

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
        """Accept every experiment: Ray has no section in the configuration."""

    def submit(self, job: ClusterJob) -> None:
        self._ask(request_of(job, self._ask({"op": "nodes"})))

    def cancel(self, name: str, *, force: bool = False) -> None:
        self._ask({"op": "cancel", "name": _PREFIX + name, "force": force})

    def statuses(self, names: Collection[str]) -> Mapping[str, JobStatus]:
        # read the jobs first, so that a node that dies in between is seen as dead
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
            [sys.executable, "-m", "zero_trial.master.agent.ray", self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._env,
        )
        self._exchange("", _BEGIN_SECONDS)

    def _exchange(self, line: str, seconds: float) -> Any:
        """Send a line, unless empty, and return the answer. Raises MasterError."""
        driver = self._driver
        if driver is None or driver.stdin is None or driver.stdout is None:
            raise MasterError("the Ray driver is not running", where="--on ray")
        late = False
        try:
            driver.stdin.write(line)
            driver.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(driver.stdout, selectors.EVENT_READ)
                late = not selector.select(seconds)
            if late:
                driver.kill()  # jobs keep running without the driver
            said = driver.stdout.readline()
        except OSError as error:
            raise EngineBusy("the Ray driver ended", where="--on ray", got=str(error)) from error
        why = f"the driver did not answer within {seconds:.0f} s" if late else "the driver ended"
        found = json.loads(said) if said else {"error": why}
        if "error" not in found:
            return found["answer"]
        where = f"--on ray={self._address or 'auto'}"
        if not line or not said:
            self._end()
            raise EngineBusy("Ray does not answer", where=where, got=found["error"])
        raise MasterError("Ray rejected a request", where=where, got=found["error"])

    def _end(self) -> None:
        if self._driver is not None and self._driver.stdin is not None:
            with suppress(OSError):  # input that it did not read
                self._driver.stdin.close()  # the driver exits at the end of its input
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


# -- the driver


class _NodeProcess:
    """An actor on one node that runs a command, with the node's name appended, and waits for it.
    Ray sends this class to the node by value, so it must not use the rest of zero_trial."""

    def __init__(self, command: Sequence[str], pythonpath: str, output: str) -> None:
        import ctypes
        import signal
        import socket

        import ray

        # must equal the result of name_of on the driver
        name = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}"
        self._code: int | str | None = None
        self._started = threading.Event()
        self._ended = threading.Event()

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, see prctl(2)

        def run() -> None:  # PDEATHSIG is sent when this thread ends
            try:
                with open(output, "ab") as file:
                    try:
                        self._child = subprocess.Popen(
                            [*command, name],
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=file,
                            cwd="/",
                            env={**os.environ, "PYTHONPATH": pythonpath},
                            preexec_fn=die_with_parent,
                        )
                    except OSError as error:
                        file.write(f"{error}\n".encode())
                        return
                self._started.set()
                self._code = self._child.wait()
            except OSError as error:  # this node does not see the master's folder
                self._code = f"{name}: {error}"
            finally:
                self._started.set()
                self._ended.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> int | str | None:
        """Return the exit code of the command, or 127 or an error message if it could not start;
        None while it runs.

        This never blocks: a blocking call, even of a dead driver, would occupy a thread here.
        """
        if not self._ended.is_set():
            return None
        return 127 if self._code is None else self._code

    def stop(self) -> None:
        """Send SIGTERM to the command."""
        self._started.wait()
        if self._code is None:
            self._child.terminate()


class _Job:
    """A job of this or an earlier driver: its placement group, its actors and their results."""

    def __init__(self, ray: Any, group: Any, actors: Sequence[Any]) -> None:
        self._ray = ray
        self._group = group
        self._actors = actors  # None: an actor of an earlier driver that no longer exists
        self._lost = None in actors
        self._asked: dict[int, Any] = {}  # rank -> pending result
        self._codes: list[int | str | None] = [
            "the actor no longer exists" if actor is None else None for actor in actors
        ]
        self._nodes: list[str] = []  # where the group was first placed
        self._canceled = False
        self._stopped = False

    def ask(self) -> list[Any]:
        """Request missing results of running actors; return all pending results."""
        table = self._ray.util.placement_group_table(self._group)
        # Ray places the group of a lost actor again, on nodes where nothing of the job runs
        if table["state"] == "CREATED" and not self._nodes and not self._lost:
            self._nodes = [table["bundles_to_node_id"][rank] for rank in range(len(self._actors))]
        for rank, actor in enumerate(self._actors):
            if self._nodes and self._codes[rank] is None and rank not in self._asked:
                self._asked[rank] = actor.result.remote()
        return list(self._asked.values())

    def look(self) -> dict[str, Any]:
        """Return the job's nodes, and the exit codes that have arrived so far.

        If a node ends without recording its exit (`agent.node` exits with 0 otherwise), stop the
        other nodes, which would wait for it.
        """
        answers = list(self._asked.values())
        done, _ = self._ray.wait(answers, num_returns=len(answers), timeout=0) if answers else ([], [])
        for rank, answer in list(self._asked.items()):
            if answer in done:
                del self._asked[rank]
                try:
                    self._codes[rank] = self._ray.get(answer)
                except self._ray.exceptions.RayError as error:
                    self._codes[rank] = str(error).strip().splitlines()[0]
        waiting = [actor for actor, code in zip(self._actors, self._codes, strict=True) if code is None]
        if waiting and any(self._codes) and not self._stopped:
            self._stopped = True
            for actor in waiting:
                actor.stop.remote()
        return {
            "nodes": self._nodes,
            "codes": self._codes,
            "canceled": self._canceled,
            "lost": self._lost,
        }

    def cancel(self, *, force: bool) -> None:
        """Ask the processes to end; with ``force``, or if not placed yet, remove the job."""
        self._canceled = True
        self.ask()
        actors = [actor for actor in self._actors if actor is not None]
        if not force and self._nodes:
            with suppress(self._ray.exceptions.RayError):
                self._ray.get([actor.stop.remote() for actor in actors], timeout=_STOP_SECONDS)
            return
        for actor in actors:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)


class _RayDriver:
    """Handles the requests of one master."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._known: dict[str, _Job] = {}

    def nodes(self) -> list[dict[str, Any]]:
        """List the machines that Ray knows, including dead ones."""
        kept = ("NodeID", "Alive", "NodeManagerAddress", "NodeManagerHostname", "Resources")
        return [{key: node[key] for key in kept} for node in self._ray.nodes()]

    def submit(
        self, name: str, bundles: list[dict[str, float]], labels: dict[str, str], command: list[str], **files: str
    ) -> None:
        """Create a job's placement group and its actors, which start once it is placed."""
        ray = self._ray
        group = ray.util.placement_group(
            bundles,
            strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[labels] * len(bundles) if labels else None,
        )
        actors = []
        for rank, bundle in enumerate(bundles):
            place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            )
            options: dict[str, Any] = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            actor = ray.remote(_NodeProcess).options(
                name=f"{name}-{rank}",
                lifetime="detached",
                max_concurrency=4,
                scheduling_strategy=place,
                **options,
            )
            actors.append(actor.remote([*command, str(rank)], files["pythonpath"], files["output"]))
        self._known[name] = _Job(ray, group, actors)

    def cancel(self, name: str, force: bool) -> None:
        """Ask the processes of a job to end; with ``force``, remove the job entirely."""
        job = self._find(name)
        if job is not None:
            job.cancel(force=force)
            if force:
                self._known.pop(name)

    def look(self, names: list[str]) -> dict[str, Any]:
        """Return the state of these jobs; jobs that Ray does not know are omitted."""
        found = {name: self._find(name) for name in names}
        jobs = {name: job for name, job in found.items() if job is not None}
        answers = [answer for job in jobs.values() for answer in job.ask()]
        if answers:
            self._ray.wait(answers, num_returns=len(answers), timeout=_RESULT_SECONDS)
        return {name: job.look() for name, job in jobs.items()}

    def _find(self, name: str) -> _Job | None:
        if name not in self._known:
            try:
                group = self._ray.util.get_placement_group(name)
            except ValueError:
                return None
            actors: list[Any] = [None] * group.bundle_count  # of an earlier driver; None: the actor died
            for rank in range(group.bundle_count):
                with suppress(ValueError):
                    actors[rank] = self._ray.get_actor(f"{name}-{rank}")
            self._known[name] = _Job(self._ray, group, actors)
        return self._known[name]


def main(address: str) -> int:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")

    def send(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    os.dup2(2, 1)  # keep Ray's output out of the answers
    try:
        import ray
        import ray.util.scheduling_strategies

        ray.init(address=address or "auto", namespace="zero_trial", log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises many types
        send({"error": f"{type(error).__name__}: {error}"})
        return 1
    driver = _RayDriver(ray)
    operations: dict[str, Any] = {
        "nodes": driver.nodes,
        "submit": driver.submit,
        "cancel": driver.cancel,
        "look": driver.look,
    }
    send({"answer": None})
    for line in sys.stdin:
        try:
            request = json.loads(line)
            send({"answer": operations[request.pop("op")](**request)})
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
