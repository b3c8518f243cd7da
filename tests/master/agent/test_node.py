"""What a node adds to the order that the master has written, and how nodes meet."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.master.fakes import Sandbox
from zero_trial.errors import MasterError
from zero_trial.master.agent.environment import Ports
from zero_trial.master.agent.node import completed, meet, own_address
from zero_trial.master.agent.resources import Node
from zero_trial.master.http import listen
from zero_trial.master.records import Conflict, Invalid


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({}, {"DET_SLOT_IDS": "[0, 1]", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "", "DET_AGENT_ID": "n1"}),
        ({"threads": 3}, {"OMP_NUM_THREADS": "3"}),
        ({"kind": "cuda"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ({"slots": 0}, {"DET_SLOT_IDS": "[]", "OMP_NUM_THREADS": "8"}),
        ({"nodes": 2}, {"DET_SOCKET_ROOT": "/tmp/zt-1", "C10D_PORT": "10", "INTER_TRAIN_PROCESS_COMM_PORT_2": "36"}),
    ],
)
def test_the_environment_of_a_node(order: dict[str, Any], expected: dict[str, str]) -> None:
    whole = {"env": {"A": "b"}, "slots": 2, "threads": 0, "kind": "cpu", "nodes": 1, **order}
    env = completed(whole, Path("/f/node-1"), "n1", Ports(10, 20, 30), "2,3", 8, "/tmp/zt-1")
    assert {name: env.get(name) for name in expected} == expected
    assert (env["A"], env["DET_RUN_ROOT"], env["TMPDIR"]) == ("b", "/f/node-1/root", "/tmp/zt-1")
    assert ("DET_SOCKET_ROOT" in env) == (whole["nodes"] > 1)


def test_nodes_meet_through_the_master(tmp_path: Path) -> None:
    master = Sandbox(tmp_path / "root", nodes=[Node("n1", 1), Node("n2", 1, 1)])
    master.create(resources={"slots_per_trial": 2})
    order = master.run_of(1)
    assert (order.nodes, order.allocation.slots) == (2, (0, 1))
    with listen(master, port=0) as server:
        assert own_address(server.url) == "127.0.0.1"
        env = {
            "DET_MASTER": server.url,
            "DET_ALLOCATION_ID": order.allocation.id,
            "DET_SESSION_TOKEN": order.token,
        }
        found: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda rank=rank: found.update({rank: meet(env, rank, 2, {"address": f"a{rank}"})}))  # type: ignore[misc]
            for rank in (1, 0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        peers = [{"address": "a0", "rank": 0}, {"address": "a1", "rank": 1}]
        assert found == {0: peers, 1: peers}
        with pytest.raises(MasterError):
            meet({**env, "DET_SESSION_TOKEN": "wrong"}, 0, 2, {})
    tasks = master.tasks
    assert tasks.all_gather(order.allocation.id, "next", 1, "x", 0.0) == ["x"]  # another one begins
    with pytest.raises(Conflict):
        tasks.all_gather(order.allocation.id, "alone", 2, "x", 0.0)
    with pytest.raises(Invalid):
        tasks.all_gather(order.allocation.id, "alone", 3, "x", 0.0)
    master.close()


def test_runs_on_machines_that_come_and_go(tmp_path: Path) -> None:
    """Placement, what the engine chose instead, and the loss of a machine."""
    master = Sandbox(tmp_path / "root", nodes=[Node("n1", 2), Node("n2", 2, 2)])
    master.create(resources={"slots_per_trial": 2}, max_restarts=0)
    master.create(resources={"slots_per_trial": 4})
    first = master.run_of(1)
    assert first.nodes == 1 and len(master.runs()) == 1
    other = next(name for name in ("n1", "n2") if name not in master.machine.nodes_of(first.allocation))
    master.on_started(first.allocation.id, [other])
    assert master.machine.nodes_of(master.tasks.allocation(first.allocation.id)) == [other]
    held = {agent.id: sum(slot.allocation_id is not None for slot in agent.slots) for agent in master.machine.agents()}
    assert held == {other: 2, **{name: 0 for name in ("n1", "n2") if name != other}}
    master.agent.machines = tuple(node for node in master.agent.machines if node.name != other)
    from zero_trial.master.agent.processes import Exit

    del master.agent.running[first.allocation.id]
    master.on_exited(first.allocation.id, Exit(137, 0.0, killed=True, why="a machine was lost"))
    again = master.run_of(1)
    assert again.allocation.run_id == 2 and other not in master.machine.nodes_of(again.allocation)
    assert master.trials.get(1).restarts == 0 and len(master.runs()) == 1  # the large one waits for its machines
    assert json.loads(json.dumps(master.machine.resource_pools()[0].slots)) == 2
    master.close()
