"""Whole trials by Determined's ``det`` and harness on real clusters of two nodes: on Ray over both
of them, after the death of the master; on Slurm after the loss of a node. What differs between the
engines is tested in tests/master/agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.master.det import Det, running
from tests.master.engines import Cluster, lose_one, places, ray, results, slurm, submit

# With the `det` of this file; the others of its kind run here with --on.
from tests.master.test_det_cli import test_kill_cancel_and_their_exit_codes  # noqa: F401

pytest.importorskip("determined")


@contextmanager
def master(engine: AbstractContextManager[Cluster], folder: Path) -> Iterator[tuple[Cluster, Det]]:
    with engine as cluster, pytest.MonkeyPatch.context() as patch:
        # det has a home of its own here; kernels that were built once are in the usual place
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
        with running(folder, "--on", cluster.on, "--cpu") as made:
            yield cluster, made


@pytest.fixture(scope="module")
def on_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Det]]:
    with master(slurm(tmp_path_factory.mktemp("slurm")), tmp_path_factory.mktemp("master")) as made:
        yield made


@pytest.fixture(scope="module")
def det(on_slurm: tuple[Cluster, Det]) -> Det:
    return on_slurm[1]


def test_after_the_loss_of_a_node_a_trial_goes_on_to_the_bit(on_slurm: tuple[Cluster, Det]) -> None:
    cluster, det = on_slurm
    lose_one(det, cluster, "lost", 1, {}, told=True)


def test_a_trial_on_both_nodes_goes_on_while_its_master_is_dead(tmp_path: Path) -> None:
    """It reports meanwhile; the next master adopts it, and nothing is lost, doubled or started
    again."""
    with master(ray(tmp_path, slots=1), tmp_path) as (cluster, det):
        assert sorted(agent["id"] for agent in det.json("agent", "list")) == cluster.nodes()
        gate = det.folder / "gate"
        number = submit(det, 2, wait_at=4, wait_for=str(gate))
        det.wait_for_line(number, "waits at its gate")
        det.kill_9()
        gate.touch()
        det.up()
        assert det.wait(number) == "COMPLETED", det.logs(number)
        log = det.logs(number)
        assert places(det, number) == [cluster.nodes()] and log.count("one of 2 ranks") == 2
        found = results(det, number)
        assert [step for step, _ in found["training"]] == list(range(1, 9))
        assert [step for step, _ in found["validation"]] == [4, 8]
        assert "resumed at" not in log and det.trials(number)[0]["restarts"] == 0
