"""Placement: which of the ways to name hosts decides, and what is refused."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import HostPlacement, HostPlan, PlacementRequest, RendezvousSpec, place
from zero_trial.launch.this_host import HostDevices

CPU = HostDevices(cores=4, gpus=0)
TWO_GPUS = HostDevices(cores=16, gpus=2)
FILE = "a slots=2\nb slots=2\n"
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}


def put(
    request: PlacementRequest,
    env: dict[str, str] | None = None,
    devices: HostDevices = CPU,
    names: tuple[str, ...] = ("b",),
) -> HostPlacement:
    return place(request, env or {}, devices, names, default_slots=devices.gpus or 1)


def test_nothing_said_is_this_host_alone():
    assert put(PlacementRequest()) == HostPlacement(HostPlan("localhost", 1, RendezvousSpec()))
    assert put(PlacementRequest(), devices=TWO_GPUS) == HostPlacement(HostPlan("localhost", 2, RendezvousSpec()))
    assert put(PlacementRequest(slots=3)) == HostPlacement(HostPlan("localhost", 3, RendezvousSpec()))


def test_a_meeting_point():
    request = PlacementRequest(slots=2, nnodes="2", node_rank=1, master_addr="10.0.0.1", master_port=7)
    assert put(request) == HostPlacement(HostPlan("localhost", 2, RendezvousSpec("2", 1, "10.0.0.1", 7)))
    elastic = put(PlacementRequest(nnodes="1:3", rdzv_endpoint="head:1", rdzv_id="x"))
    assert elastic == HostPlacement(HostPlan("localhost", 1, RendezvousSpec("1:3", 0, endpoint="head:1", run_id="x")))


def test_a_hostfile():
    second = HostPlan("b", 2, RendezvousSpec("2", 1, "a", 29500))
    assert put(PlacementRequest(hostfile=FILE)) == HostPlacement(second)
    first = HostPlan("a", 2, RendezvousSpec("2", 0, "a", 29500))
    assert put(PlacementRequest(hostfile=FILE, spread=True), names=("a",)) == HostPlacement(first, (second,))
    assert put(PlacementRequest(hostfile=FILE, spread=True), names=("head",)) == HostPlacement(None, (first, second))


def test_a_filter_of_this_host():
    request = PlacementRequest(include="localhost:1")
    assert put(request, devices=TWO_GPUS) == HostPlacement(HostPlan("localhost", 1, RendezvousSpec(), visible=(1,)))


def test_slurm():
    assert put(PlacementRequest(slots=4), SLURM) == HostPlacement(
        HostPlan("localhost", 4, RendezvousSpec("2", 0, "n1", 29500, run_id="17"))
    )


@pytest.mark.parametrize(
    ("request_", "devices", "message"),
    [
        (PlacementRequest(slots=3), TWO_GPUS, "more ranks than GPUs: got 3, expected at most 2"),
        (PlacementRequest(slots=-1), CPU, "at least one rank"),
        (PlacementRequest(num_nodes=2), CPU, "several hosts need a hostfile"),
        (PlacementRequest(nnodes="2"), CPU, "an address to meet at"),
        (PlacementRequest(nnodes="2", master_addr="a"), CPU, "which of the hosts is this?"),
        (
            PlacementRequest(nnodes="2", master_addr="a", node_rank=2),
            CPU,
            "which of the hosts is this?: got 2, expected 0 to 1",
        ),
        (PlacementRequest(nnodes="1:2"), CPU, "a range of hosts needs --rdzv-endpoint"),
        (PlacementRequest(nnodes="2", master_addr="a", node_rank=0, include="a"), CPU, "do not go with --nnodes"),
        (PlacementRequest(hostfile="c slots=1\nd slots=1"), CPU, "this host is not in the hostfile"),
    ],
)
def test_refusals(request_: PlacementRequest, devices: HostDevices, message: str):
    with pytest.raises(ConfigError) as caught:
        put(request_, devices=devices)
    assert message in str(caught.value)
