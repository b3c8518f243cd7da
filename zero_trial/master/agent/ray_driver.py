"""The process of a master that speaks to Ray: it reads requests as lines of JSON from stdin and
answers each with a line on stdout.

It is a process of its own because a Ray driver ends when the Ray processes of its machine do. Jobs
are placement groups and actors that outlive it; the next driver finds them by their names. Run as
``python -m zero_trial.master.agent.ray_driver ADDRESS``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_NAMESPACE = "zero_trial"
_STOP_SECONDS = 5.0
_RESULT_SECONDS = 0.2  # that actors get to answer; others are read at the next look


class _NodeProcess:
    """The part of an allocation on one node: an actor that runs a command with the name of the node
    behind it, and waits. It is sent to the node as it is, and needs nothing else of zero_trial.
    """

    def __init__(self, command: Sequence[str], pythonpath: str, output: str) -> None:
        import ctypes
        import signal
        import socket
        import subprocess
        import threading

        # as ray.name_of makes it from what the driver sees
        name = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}"
        self._code: int | str | None = None
        self._started = threading.Event()
        self._ended = threading.Event()

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, see prctl(2)

        def run() -> None:  # the signal comes when this thread ends
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
            except OSError as error:  # it does not see the master's folder
                self._code = f"{name}: {error}"
            finally:
                self._started.set()
                self._ended.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> int | str | None:
        """Return the exit code of the command, 127 or why if it could not begin; None while it
        runs.

        It does not wait: each driver that asked would hold a thread of this actor, dead ones too.
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
    """A job of this or an earlier driver: its placement group, its actors and what they answer."""

    def __init__(self, group: PlacementGroup, actors: Sequence[Any]) -> None:
        self._group = group
        self._actors = actors  # None: of an earlier driver, and gone
        self._lost = None in actors
        self._asked: dict[int, Any] = {}  # rank -> its answer to come
        self._codes: list[int | str | None] = ["its actor is gone" if actor is None else None for actor in actors]
        self._nodes: list[str] = []  # where it was placed first
        self._canceled = False
        self._stopped = False
        self._state = ""

    def ask(self) -> list[Any]:
        """Ask what runs for its results, unless it was asked; return all answers to come."""
        table = placement_group_table(self._group)
        self._state = table["state"]
        # the group of a lost actor is placed again, where nothing of the job runs
        if self._state == "CREATED" and not self._nodes and not self._lost:
            self._nodes = [table["bundles_to_node_id"][rank] for rank in range(len(self._actors))]
        for rank, actor in enumerate(self._actors):
            if self._nodes and self._codes[rank] is None and rank not in self._asked:
                self._asked[rank] = actor.result.remote()
        return list(self._asked.values())

    def look(self) -> dict[str, Any]:
        """Return where it is, and what has ended of it as far as it has answered.

        Once a node has ended and not recorded it (`agent.node` ends with 0 otherwise), the others
        are asked to end: they would wait for it.
        """
        answers = list(self._asked.values())
        done, _ = ray.wait(answers, num_returns=len(answers), timeout=0) if answers else ([], [])
        for rank, answer in list(self._asked.items()):
            if answer in done:
                del self._asked[rank]
                try:
                    self._codes[rank] = ray.get(answer)
                except ray.exceptions.RayError as error:
                    self._codes[rank] = str(error).strip().splitlines()[0]
        waiting = [actor for actor, code in zip(self._actors, self._codes, strict=True) if code is None]
        if waiting and any(self._codes) and not self._stopped:
            self._stopped = True
            for actor in waiting:
                actor.stop.remote()
        return {
            "state": self._state,
            "nodes": self._nodes,
            "codes": self._codes,
            "canceled": self._canceled,
            "lost": self._lost,
        }

    def cancel(self, *, force: bool) -> None:
        """Ask the processes to end; remove all of it with ``force``, or if it has no place."""
        self._canceled = True
        self.ask()
        actors = [actor for actor in self._actors if actor is not None]
        if not force and self._nodes:
            with suppress(ray.exceptions.RayError):
                ray.get([actor.stop.remote() for actor in actors], timeout=_STOP_SECONDS)
            return
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(self._group)


class _RayDriver:
    """Answers the requests of one master."""

    def __init__(self) -> None:
        self._known: dict[str, _Job] = {}

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Carry out one request; its ``op`` names the method."""
        operations: dict[str, Callable[..., Any]] = {
            "nodes": self.nodes,
            "submit": self.submit,
            "cancel": self.cancel,
            "look": self.look,
        }
        return operations[request["op"]](**{key: value for key, value in request.items() if key != "op"})

    def nodes(self) -> list[dict[str, Any]]:
        """List the machines that Ray knows, dead ones included."""
        kept = ("NodeID", "Alive", "NodeManagerAddress", "NodeManagerHostname", "Resources")
        return [{key: node[key] for key in kept} for node in ray.nodes()]

    def submit(
        self, name: str, bundles: list[dict[str, float]], labels: dict[str, str], command: list[str], **files: str
    ) -> None:
        """Create the placement group of a job, and its actors, which wait for it."""
        group = placement_group(
            bundles,
            strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[labels] * len(bundles) if labels else None,
        )
        actors = []
        for rank, bundle in enumerate(bundles):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            options: dict[str, Any] = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            actor = ray.remote(_NodeProcess).options(
                name=f"{name}-{rank}",
                lifetime="detached",
                max_concurrency=4,
                scheduling_strategy=place,
                **options,
            )
            actors.append(actor.remote([*command, str(rank)], files["pythonpath"], files["output"]))
        self._known[name] = _Job(group, actors)

    def cancel(self, name: str, force: bool) -> None:
        """Ask the processes of a job to end; with ``force`` remove all of it."""
        job = self._find(name)
        if job is not None:
            job.cancel(force=force)
            if force:
                self._known.pop(name)

    def look(self, names: list[str]) -> dict[str, Any]:
        """Return how these jobs go, without those that Ray does not know."""
        found = {name: self._find(name) for name in names}
        jobs = {name: job for name, job in found.items() if job is not None}
        answers = [answer for job in jobs.values() for answer in job.ask()]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_RESULT_SECONDS)
        return {name: job.look() for name, job in jobs.items()}

    def _find(self, name: str) -> _Job | None:
        if name not in self._known:
            try:
                group = get_placement_group(name)
            except ValueError:
                return None
            self._known[name] = _Job(group, [_actor(f"{name}-{rank}") for rank in range(group.bundle_count)])
        return self._known[name]


def _actor(name: str) -> Any:
    """Return the actor of an earlier driver; None if it has died."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def main(address: str) -> int:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Ray prints must not be among the answers
    try:
        ray.init(address=address or "auto", namespace=_NAMESPACE, log_to_driver=False, configure_logging=False)
    except Exception as error:  # Ray raises many kinds
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        return 1
    driver = _RayDriver()
    answers.write(json.dumps({"answer": None}) + "\n")
    answers.flush()
    for line in sys.stdin:
        try:
            answer = {"answer": driver.answer(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
