"""What is asked of Ray and read from its answers, by tables; and a driver that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError, MasterError
from zero_trial.master.agent import ray as subject
from zero_trial.master.agent.cluster import ClusterJob, JobEnd, JobStatus
from zero_trial.master.agent.ray import RayEngine, nodes_in, request_of, require_ray, status_of
from zero_trial.master.agent.resources import Node


def node(number: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": number * 8,
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": f"h{number}",
        "Resources": resources,
    }


MACHINES = [node("1", CPU=4.0, memory=1e9), node("2", CPU=5.0), node("3", memory=1e9), node("4", alive=False, CPU=4.0)]


def test_nodes_and_their_slots() -> None:
    first, second = nodes_in(MACHINES, cpus=2, gpus=True)
    assert (first, second.slots) == (Node("h1-111111", 2, address="10.0.0.1"), 2)
    with_gpu = [*MACHINES, node("5", CPU=8.0, GPU=4.0)]
    assert [(each.slots, each.kind) for each in nodes_in(with_gpu, cpus=1, gpus=True)] == [(4, "cuda")]
    assert [each.slots for each in nodes_in(with_gpu, cpus=1, gpus=False)] == [4, 5, 8]


@pytest.mark.parametrize(
    ("slots", "kind", "avoid", "bundles", "labels"),
    [
        (2, "cpu", (), [{"CPU": 4.0}] * 2, {}),
        (2, "cuda", (), [{"GPU": 2.0}] * 2, {}),
        (0, "cpu", (), [{"CPU": 2.0}] * 2, {}),
        (1, "cpu", ("h2-222222", "h4-444444"), [{"CPU": 2.0}] * 2, {"ray.io/node-id": "!in(22222222)"}),
    ],
)
def test_the_request_of_a_job(
    tmp_path: Path, slots: int, kind: str, avoid: tuple[str, ...], bundles: list[Any], labels: dict[str, str]
) -> None:
    job = ClusterJob("1.a.1", tmp_path, 2, slots, kind, "default", avoid, python="/py")
    made = request_of(job, MACHINES, cpus=2)
    assert (made["name"], made["bundles"], made["labels"]) == ("zt-1.a.1", bundles, labels)
    assert made["command"] == ["/py", "-m", "zero_trial.master.agent.node", str(tmp_path)]


ONE, DEAD = "11111111", "44444444"


@pytest.mark.parametrize(
    ("nodes", "codes", "canceled", "status"),
    [
        ([], [None], False, JobStatus(why="Ray has no room for its placement group yet")),
        ([], ["killed"], True, JobStatus(end=JobEnd.CANCELED)),
        ([ONE], [None], False, JobStatus(("h1-111111",))),
        ([ONE], [0], False, JobStatus(("h1-111111",), JobEnd.DONE)),
        ([ONE], [3], False, JobStatus(("h1-111111",), JobEnd.FAILED)),
        ([ONE], [143], True, JobStatus(("h1-111111",), JobEnd.CANCELED)),
        ([ONE], ["it died"], False, JobStatus(("h1-111111",), JobEnd.FAILED, "Ray: it died")),
        ([ONE, DEAD], [None, None], False, JobStatus(("h1-111111", "h4-444444"), JobEnd.NODE_LOST, "Ray: node h4-444444 is dead")),
        ([ONE, DEAD], [1, "it died"], True, JobStatus(("h1-111111", "h4-444444"), JobEnd.NODE_LOST, "Ray: node h4-444444 is dead")),
        (["99999999"], [0], False, JobStatus(("?-999999",), JobEnd.NODE_LOST, "Ray: node ?-999999 is dead")),
    ],
)  # fmt: skip
def test_states_of_jobs(nodes: list[str], codes: list[Any], canceled: bool, status: JobStatus) -> None:
    assert status_of({"state": "CREATED", "nodes": nodes, "codes": codes, "canceled": canceled}, MACHINES) == status


DRIVER = """
import json, sys
print(json.dumps({"answer": None}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "cancel":
        sys.exit(1)
    print(json.dumps({"error": "no such thing"} if request["op"] == "look" else {"answer": []}), flush=True)
"""


def test_a_driver_that_ends_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, begun = subprocess.Popen, []

    def begin(words: list[str], **more: Any) -> Any:
        begun.append(words)
        return plain([sys.executable, "-c", DRIVER], **more)

    monkeypatch.setattr(subject.subprocess, "Popen", begin)
    engine = RayEngine("10.0.0.1:6379", env=os.environ)
    assert engine.nodes() == [] and begun[0][-1] == "10.0.0.1:6379"
    with pytest.raises(MasterError, match="no such thing"):
        engine.statuses(["a"])
    with pytest.raises(MasterError):
        engine.cancel("a")
    assert engine.nodes() == [] and len(begun) == 2
    engine.close()


def test_without_ray_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"zero_trial\[ray\]"):
        require_ray()
