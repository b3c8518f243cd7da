"""Whole trials by the genuine ``det`` and the genuine harness on a real cluster of two nodes: over
both of them, and after the loss of one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.master.det import Det, running, until
from tests.master.engines import Cluster, ray, slurm
from tests.runtime.line_model import FILES, experiment

pytest.importorskip("determined")

SPEAKS = 'import os\nprint("one of", os.environ.get("WORLD_SIZE"), "ranks", flush=True)\n'

ENGINES: dict[str, Callable[[Path], AbstractContextManager[Cluster]]] = {"slurm": slurm, "ray": ray}


@pytest.fixture(scope="module", params=ENGINES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ENGINES[request.param](tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def det(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Det]:
    with pytest.MonkeyPatch.context() as patch:
        # det has a home of its own here; kernels that were built once are in the usual place
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
        with running(tmp_path_factory.mktemp("master"), "--on", cluster.on, "--cpu") as master:
            yield master


def submit(det: Det, slots: int, **hyperparameters: Any) -> int:
    """``det experiment create``; the experiment's number, which is its trial's too."""
    context = det.folder / "line"
    context.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (context / name).write_text(text + SPEAKS if name == "model_def.py" else text)
    resources, seed = {"slots_per_trial": slots}, {"experiment_seed": 7}
    config = {**experiment("module", **hyperparameters), "resources": resources, "reproducibility": seed}
    file = det.folder / "line.yaml"
    file.write_text(json.dumps({**config, "max_restarts": 0}))
    out = det.ok("experiment", "create", str(file), str(context))
    return int(out.rpartition("Created experiment ")[2].split()[0])


def workloads(det: Det, trial: int, kind: str) -> dict[int, Any]:
    """Step -> metrics."""
    found = det.json("trial", "describe", str(trial), "--metrics")["workloads"]
    return {w[kind]["totalBatches"]: w[kind]["metrics"]["avgMetrics"] for w in found if w.get(kind)}


def places(det: Det, trial: int) -> list[list[str]]:
    """The nodes of each run, as the master has said in the trial's log."""
    return [names.split(", ") for names in re.findall(r"run \d+ runs on (.+)", det.logs(trial))]


def test_one_trial_on_both_nodes(det: Det, cluster: Cluster) -> None:
    assert sorted(agent["id"] for agent in det.json("agent", "list")) == cluster.nodes()
    number = submit(det, 4)
    assert det.wait(number) == "COMPLETED", det.logs(number)
    assert sorted(places(det, number)[0]) == cluster.nodes()
    assert det.logs(number).count("one of 4 ranks") == 4 and list(workloads(det, number, "training"))[-1] == 8


def test_after_the_loss_of_a_node_a_trial_goes_on_to_the_bit(det: Det, cluster: Cluster) -> None:
    lose_one(det, cluster, "gate", submit(det, 2))


@pytest.mark.extended
def test_five_losses_in_a_row(det: Det, cluster: Cluster) -> None:
    whole = submit(det, 2)
    for time in range(5):
        lose_one(det, cluster, f"gate {time}", whole)


def lose_one(det: Det, cluster: Cluster, name: str, whole: int) -> None:
    """Lose the node of a trial in the middle of a step; it goes on on the other node with the
    numbers of ``whole``, which is not interrupted. Then the node comes back."""
    gate = det.folder / name
    lost = submit(det, 2, wait_at=6, wait_for=str(gate))
    det.wait_for_line(lost, "waits at its gate")
    [[node]] = places(det, lost)
    assert det.wait(whole) == "COMPLETED", det.logs(whole)
    cluster.lose(node)
    gate.touch()
    until(lambda: len(places(det, lost)) == 2, "it is not started again")
    assert det.wait(lost) == "COMPLETED", det.logs(lost)
    assert places(det, lost)[1] != [node] and det.trials(lost)[0]["restarts"] == 0
    log = det.logs(lost)
    assert "a machine was lost" in log and "resumed at step 4" in log
    for kind in ("training", "validation"):
        assert workloads(det, lost, kind) == workloads(det, whole, kind)
    cluster.restore(node)
    until(lambda: len(cluster.nodes()) == len(det.json("agent", "list")) == 2, "it does not come back")
