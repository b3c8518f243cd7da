"""What a node adds to the order that the master has written, and how nodes meet."""

from __future__ import annotations

import email.message
import json
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from tests.master.fakes import Sandbox
from zero_trial.errors import MasterError
from zero_trial.master.agent import storage
from zero_trial.master.agent.node import code_of, completed, is_refused, meet, order_in, own_address, threads_of
from zero_trial.master.agent.resources import Exit, Node
from zero_trial.master.http import listen
from zero_trial.master.records import Conflict, Invalid


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ({}, {"DET_SLOT_IDS": "[0, 1]", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "", "DET_AGENT_ID": "n1"}),
        (
            {"own": ["OMP_NUM_THREADS=9", "TMPDIR=/mine", "DET_AGENT_ID=x"]},
            {"OMP_NUM_THREADS": "9", "TMPDIR": "/mine", "DET_AGENT_ID": "n1"},
        ),
        ({"kind": "cuda"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ({"slot_ids": []}, {"DET_SLOT_IDS": "[]"}),
        ({"nodes": 2}, {"DET_SOCKET_ROOT": "/scratch/1", "C10D_PORT": "10", "INTER_TRAIN_PROCESS_COMM_PORT_2": "36"}),
    ],
)
def test_the_environment_of_a_node(order: dict[str, Any], expected: dict[str, str]) -> None:
    config = json.dumps({"environment": {"environment_variables": {"cpu": order.pop("own", [])}}})
    whole = {"env": {"A": "b", "DET_EXPERIMENT_CONFIG": config}, "slot_ids": [0, 1], "kind": "cpu", "nodes": 1, **order}
    env = completed(
        whole,
        Path("/f/node-1"),
        "n1",
        {"C10D_PORT": "10", "INTER_TRAIN_PROCESS_COMM_PORT_2": "36"},
        "2,3",
        4,
        "/scratch/1",
    )
    plain = {"TMPDIR": "/scratch/1", "OMP_NUM_THREADS": "4", **expected}
    assert {name: env.get(name) for name in plain} == plain
    assert (env["A"], env["DET_RUN_ROOT"]) == ("b", "/f/node-1/root")
    assert ("DET_SOCKET_ROOT" in env) == (whole["nodes"] > 1)


@pytest.mark.parametrize(
    ("slots", "known", "cores", "asked", "threads"),
    [
        (2, 3, 64, "", 3),  # one of several trials on a node: not all of its cores
        (2, 0, 8, "", 4),  # the engine does not know
        (2, 8, 8, "", 4),  # it may use fewer
        (2, 3, 64, "24", 12),  # --cpus-per-task of slurm.sbatch_args
        (0, 0, 8, "", 8),
        (4, 1, 2, "4", 1),
    ],
)
def test_threads_of_a_slot(slots: int, known: int, cores: int, asked: str, threads: int) -> None:
    assert threads_of({"slots": slots, "threads": known}, cores, asked) == threads


@pytest.mark.parametrize(
    ("ended", "nodes", "code"),
    [
        (Exit(3, 0.0), 1, 3),
        (Exit(3, 0.0), 2, 0),  # the master reads the record, and gives the others time to end
        (Exit(0, 0.0), 2, 0),
        (None, 1, 1),
        (None, 2, 1),
    ],
)
def test_the_engine_learns_of_a_node_that_has_recorded_nothing(ended: Exit | None, nodes: int, code: int) -> None:
    assert code_of(ended, nodes) == code


@pytest.mark.parametrize(
    ("error", "refused"),
    [(400, True), (401, True), (404, True), (409, False), (429, False), (503, False), (None, False)],
)
def test_a_refusal_is_not_repeated(error: int | None, refused: bool) -> None:
    made = URLError("refused") if error is None else HTTPError("", error, "", email.message.Message(), None)
    assert is_refused(made) is refused


def test_a_node_that_does_not_see_what_the_master_sees_says_so(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        kept = storage.kept_in({"checkpoint_storage": {"type": "shared_fs", "host_path": str(folder)}})
    assert kept is not None and kept == storage.kept_in(
        {"checkpoint_storage": {"type": "directory", "container_path": str(other)}}
    )
    with pytest.raises(MasterError, match=r"^n7: the master's folder is not shared.*--root"):
        order_in(tmp_path, "n7")
    (tmp_path / "order.json").write_text(json.dumps({"storage": kept}))
    assert order_in(tmp_path, "n7") == {"storage": kept}
    (tmp_path / "order.json").write_text(json.dumps({"storage": {**kept, "path": str(mine)}}))
    with pytest.raises(MasterError, match=r"on n7: the folder for checkpoints is not shared.*a different folder"):
        order_in(tmp_path, "n7")
    (tmp_path / "order.json").write_text(json.dumps({"storage": {**kept, "path": "/no/such"}}))
    with pytest.raises(MasterError, match="is missing"):
        order_in(tmp_path, "n7")
    assert storage.kept_in({"checkpoint_storage": {"type": "s3"}}) is None
    assert storage.kept_in({"checkpoint_storage": {"type": "shared_fs", "host_path": "/no/such"}}) is None


def test_what_a_node_has_kept_of_the_storage_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = storage.kept_in({"checkpoint_storage": {"type": "shared_fs", "host_path": str(tmp_path)}})
    assert kept is not None
    (tmp_path / "order.json").write_text(json.dumps({"storage": kept}))
    plain, stale = storage.name_of, iter([""])  # as a client of NFS that looked before the name was there
    monkeypatch.setattr(
        storage, "name_of", lambda folder: found if (found := next(stale, None)) is not None else plain(folder)
    )
    assert order_in(tmp_path, "n7") == {"storage": kept}


def test_nodes_meet_through_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # would see the token
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
        both = [{"address": "a0", "rank": 0}, {"address": "a1", "rank": 1}]
        assert found == {0: both, 1: both}
        for peers, token in ((2, "wrong"), (3, order.token)):
            with pytest.raises(MasterError, match="rejected this node's rendezvous"):
                meet({**env, "DET_SESSION_TOKEN": token}, 0, peers, {})
    tasks = master.tasks
    assert tasks.all_gather(order.allocation.id, "next", 1, "x", 0.0) == ["x"]  # another one begins
    for number in range(5):  # only the newest rounds stay: of these, a peer may have lost the answer
        for _ in range(2):
            assert tasks.all_gather(order.allocation.id, f"{number}", 1, number, 0.0) == [number]
    assert [list(sent.values()) for _, sent in master.state.gathered[order.allocation.id]] == [[3], [4]]
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
    del master.agent.running[first.allocation.id]
    master.on_exited(first.allocation.id, Exit(137, 0.0, killed=True, why="a machine was lost"))
    again = master.run_of(1)
    assert again.allocation.run_id == 2 and other not in master.machine.nodes_of(again.allocation)
    assert master.trials.get(1).restarts == 0 and len(master.runs()) == 1  # the large one waits for its machines
    assert json.loads(json.dumps(master.machine.resource_pools()[0].slots)) == 2
    master.close()
