"""What is asked of Ray and read from its answers, by tables; and a driver that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero_trial.errors import ConfigError, MasterError
from zero_trial.master.agent import ray as subject
from zero_trial.master.agent.cluster import ClusterJob, EngineBusy, JobEnd, JobStatus
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
    assert (first, second.slots) == (Node("h1-111111", 2, address="10.0.0.1", cpus=2), 2)
    with_gpu = [*MACHINES, node("5", CPU=8.0, GPU=4.0)]
    assert [(each.slots, each.kind, each.cpus) for each in nodes_in(with_gpu, cpus=1, gpus=True)] == [(4, "cuda", 2)]
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
    job = ClusterJob("1.a.1", tmp_path, 2, slots, kind, "default", avoid, python="/py", cpus=2)
    made = request_of(job, MACHINES)
    assert (made["name"], made["bundles"], made["labels"]) == ("zt-1.a.1", bundles, labels)
    assert made["command"] == ["/py", "-m", "zero_trial.master.agent.node", str(tmp_path)]


ONE, DEAD = "11111111", "44444444"


@pytest.mark.parametrize(
    ("nodes", "codes", "canceled", "status"),
    [
        ([], [None], False, JobStatus(why="Ray has no room for the placement group yet")),
        ([], ["killed"], True, JobStatus(end=JobEnd.CANCELED)),
        ([], ["the actor no longer exists", None], False, JobStatus(end=JobEnd.NODE_LOST, why="Ray: the actor no longer exists")),
        ([ONE], [None], False, JobStatus(("h1-111111",))),
        ([ONE, ONE], [None, 127], False, JobStatus(("h1-111111",) * 2)),
        ([ONE, ONE], [143, 127], False, JobStatus(("h1-111111",) * 2, JobEnd.FAILED)),
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
    seen = {
        "nodes": nodes,
        "codes": codes,
        "canceled": canceled,
        "lost": not nodes and len(codes) > 1,
    }
    assert status_of(seen, MACHINES) == status


DRIVER = """
import json, sys
print(json.dumps({"answer": None}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "cancel":
        sys.exit(1)
    if request["op"] == "submit":
        continue
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
    with pytest.raises(EngineBusy):  # a run that is submitted then waits
        engine.cancel("a")
    assert engine.nodes() == [] and len(begun) == 2
    monkeypatch.setattr(subject, "_ANSWER_SECONDS", 0.05)  # Ray does not answer
    with pytest.raises(EngineBusy, match="did not answer"):
        engine._ask({"op": "submit"})
    monkeypatch.undo()
    monkeypatch.setattr(subject.subprocess, "Popen", begin)
    assert engine.nodes() == [] and len(begun) == 3
    engine.close()


class FakeRay:
    """What a driver needs of Ray. ``living``: named actors; ``groups``: named placement groups."""

    def __init__(self) -> None:
        self.living: dict[str, FakeActor] = {}
        self.groups: dict[str, SimpleNamespace] = {}
        self.killed: list[FakeActor] = []
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.util = self

    def get_actor(self, name: str) -> FakeActor:
        if name not in self.living:
            raise ValueError(name)
        return self.living[name]

    def get_placement_group(self, name: str) -> SimpleNamespace:
        if name not in self.groups:
            raise ValueError(name)
        return self.groups[name]

    def placement_group_table(self, group: SimpleNamespace) -> dict[str, Any]:
        return {"state": "CREATED", "bundles_to_node_id": dict(enumerate(group.nodes))}

    def remove_placement_group(self, group: SimpleNamespace) -> None:
        self.groups = {name: each for name, each in self.groups.items() if each is not group}

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor)

    def wait(self, answers: list[FakeAnswer], **_: Any) -> tuple[list[FakeAnswer], list[FakeAnswer]]:
        return [each for each in answers if each.there], [each for each in answers if not each.there]

    def get(self, answer: FakeAnswer) -> Any:
        return answer.value


class FakeAnswer:
    """To a call of an actor's method."""

    def __init__(self, value: Any, there: bool) -> None:
        self.value, self.there = value, there


class FakeActor:
    """Of one command, which runs while ``code`` is None."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.answers = True
        self.asked = 0
        self.stopped = 0
        self.result = SimpleNamespace(remote=self._result)
        self.stop = SimpleNamespace(remote=self._stop)

    def _stop(self) -> None:
        self.stopped += 1

    def _result(self) -> FakeAnswer:
        self.asked += 1
        return FakeAnswer(self.code, self.answers)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Ray with a job of two actors."""
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    fake.groups["zt-1"] = SimpleNamespace(bundle_count=2, nodes=["a", "b"])
    fake.living = {f"zt-1-{rank}": FakeActor() for rank in (0, 1)}
    return fake


def test_a_driver_reads_the_results_of_an_earlier_one_without_waiting(fake: FakeRay) -> None:
    driver, (first, second) = subject._RayDriver(fake), fake.living.values()
    second.answers = False  # its node hangs
    assert driver.look(["zt-1", "zt-2"]) == {
        "zt-1": {"nodes": ["a", "b"], "codes": [None, None], "canceled": False, "lost": False}
    }
    first.code = 0
    assert driver.look(["zt-1"])["zt-1"]["codes"] == [0, None]
    driver.look(["zt-1"])
    assert (first.asked, second.asked) == (2, 1)  # one call at a time, and none of one that has ended
    assert (first.stopped, second.stopped) == (0, 0)  # the end of the first is recorded


def test_nodes_do_not_wait_for_one_that_could_not_begin(fake: FakeRay) -> None:
    driver, (first, second) = subject._RayDriver(fake), fake.living.values()
    first.code = 127
    for _ in range(3):
        assert driver.look(["zt-1"])["zt-1"]["codes"] == [127, None]
    assert (first.stopped, second.stopped) == (0, 1)


def test_a_node_that_was_lost_while_no_driver_ran(fake: FakeRay) -> None:
    driver, survivor = subject._RayDriver(fake), fake.living["zt-1-0"]
    del fake.living["zt-1-1"]
    seen = driver.look(["zt-1"])["zt-1"]
    assert status_of(seen, MACHINES).end is JobEnd.NODE_LOST
    driver.cancel("zt-1", force=True)
    assert fake.killed == [survivor] and not fake.groups  # nothing holds slots
    assert driver.look(["zt-1"]) == {}


def test_the_process_of_a_node_tells_its_result_without_waiting(fake: FakeRay, tmp_path: Path) -> None:
    fake.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "1" * 8)  # type: ignore[attr-defined]
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    made = subject._NodeProcess(["bash", "-c", f"read < {gate}; exit 3"], "", str(tmp_path / "out"))
    assert made.result() is None
    gate.write_text("go\n")
    made._ended.wait(60)
    assert made.result() == 3
    missing = subject._NodeProcess(["/no/such/program"], "", str(tmp_path / "out"))
    missing._ended.wait(60)
    assert missing.result() == 127 and "/no/such/program" in (tmp_path / "out").read_text()


def test_without_ray_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"zero_trial\[ray\]"):
        require_ray()
