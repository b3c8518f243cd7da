"""The hosts of a run, and this host, as tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import (
    HostDevices,
    HostPlan,
    PlacementRequest,
    RendezvousSpec,
    check_slots,
    choose,
    count_devices,
    first_host,
    first_hosts,
    from_slurm,
    interface_towards,
    loopback,
    own_plan,
    parse_exports,
    parse_hostfile,
    place,
    plan_hosts,
    rank_environment,
    ssh_command,
    threads_per_rank,
)

TWO = {"a": [0, 1, 2, 3], "b": [0, 1]}


def test_a_hostfile():
    assert parse_hostfile("# ours\na slots=4\n\nb  slots = 2  # small\n") == TWO


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", TWO),
        ("b", "", {"b": [0, 1]}),
        ("b@a:0,2", "", {"a": [0, 2], "b": [0, 1]}),  # in the order of the hostfile
        ("a:3,1,1", "", {"a": [1, 3]}),
        ("", "a", {"b": [0, 1]}),
        ("", "a:0@b:1", {"a": [1, 2, 3], "b": [0]}),
        ("", "b:0,1", {"a": [0, 1, 2, 3]}),
    ],
)
def test_filters(include: str, exclude: str, left: dict[str, list[int]]):
    assert choose(TWO, include, exclude) == left


def test_first_hosts():
    assert first_hosts(TWO, 1, None) == {"a": [0, 1, 2, 3]}
    assert first_hosts(TWO, None, 2) == {"a": [0, 1], "b": [0, 1]}


def test_hosts_are_numbered_in_order_and_meet_at_the_first():
    plans = plan_hosts({"a": [1, 3], "b": [0, 1]}, TWO, "", 7000)
    assert plans == [
        HostPlan("a", 2, RendezvousSpec("2", 0, "a", 7000), visible=(1, 3)),
        HostPlan("b", 2, RendezvousSpec("2", 1, "a", 7000)),  # all of its slots: nothing is hidden
    ]
    assert own_plan(plans, ["b", "b.example"], None).node_rank == 1
    assert own_plan(plans, ["c"], 0).host == "a"


def test_ssh_quotes_what_the_other_shell_reads():
    command = ssh_command(HostPlan("b", 2, RendezvousSpec()), ["python", "a b.py", "$x"], "/data/my runs", {"A": "1 2"})
    assert command[:5] == ["ssh", "-tt", "-o", "BatchMode=yes", "b"]
    assert command[5] == "cd '/data/my runs' && exec env A='1 2' python 'a b.py' '$x'"


def test_environment_file():
    assert parse_exports("# ours\nNCCL_DEBUG=INFO\nEMPTY=\nX=a=b\n") == {"NCCL_DEBUG": "INFO", "EMPTY": "", "X": "a=b"}


def put(
    request: PlacementRequest, env: dict[str, str] | None = None, gpus: int = 0, name: str = "b"
) -> tuple[HostPlan | None, tuple[HostPlan, ...]]:
    placed = place(request, env or {}, HostDevices(cores=4, gpus=gpus), (name,), default_slots=gpus or 1)
    return placed.own, placed.others


SLURM = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "3", "SLURM_NODEID": "1", "SLURM_NTASKS": "3"}
SLURM |= {"SLURM_JOB_NODELIST": "gpu[07-09]"}
Ask = PlacementRequest
FILE = "a slots=2\nb slots=2\n"
MEET = {"slots": 2, "nnodes": "2", "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 7}
ELASTIC = {"nnodes": "1:3", "rdzv_endpoint": "head:1", "rdzv_id": "x"}
FIRST, SECOND = (HostPlan(name, 2, RendezvousSpec("2", at, "a", 29500)) for at, name in enumerate("ab"))


def here(slots: int, *spec: Any, visible: tuple[int, ...] = (), **more: Any) -> HostPlan:
    return HostPlan("localhost", slots, RendezvousSpec(*spec, **more), visible=visible)


@pytest.mark.parametrize(
    ("placed", "own", "others"),
    [
        (put(Ask()), here(1), ()),  # nothing said is this host alone
        (put(Ask(), gpus=2), here(2), ()),
        (put(Ask(slots=3)), here(3), ()),
        (put(Ask(**MEET)), here(2, "2", 1, "10.0.0.1", 7), ()),
        (put(Ask(**ELASTIC)), here(1, "1:3", 0, endpoint="head:1", run_id="x"), ()),
        (put(Ask(hostfile=FILE)), SECOND, ()),  # the hostfile says which host this is
        (put(Ask(hostfile=FILE, spread=True), name="a"), FIRST, (SECOND,)),
        (put(Ask(hostfile=FILE, spread=True), name="head"), None, (FIRST, SECOND)),
        (put(Ask(include="localhost:1"), gpus=2), here(1, visible=(1,)), ()),
        (put(Ask(slots=4), SLURM), here(4, "3", 1, "gpu07", 29500, run_id="17"), ()),  # where nothing else is said
    ],
)
def test_places(
    placed: tuple[HostPlan | None, tuple[HostPlan, ...]], own: HostPlan | None, others: tuple[HostPlan, ...]
):
    assert placed == (own, others)


def plans() -> list[HostPlan]:
    return plan_hosts(TWO, TWO, "", 1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: parse_hostfile("a slots=4\nb\n"), "hostfile:2: not a host line: got 'b', expected host slots=N"),
        (lambda: parse_hostfile("a slots=x"), "hostfile:1: not a host line"),
        (lambda: parse_hostfile("a slots=1\na slots=2"), "hostfile:2: the host appears twice: got a"),
        (lambda: parse_hostfile("a slots=0"), "hostfile:1: a host needs at least one slot"),
        (lambda: parse_hostfile("# nothing\n"), "hostfile: the hostfile lists no host"),
        (lambda: choose(TWO, "a", "b"), "cannot be combined"),
        (lambda: choose(TWO, "c", ""), "no such host in the hostfile: got 'c', expected a or b"),
        (lambda: choose(TWO, "b:2", ""), "no such slot on this host: got b:2 (slot 2), expected 0 to 1"),
        (lambda: choose(TWO, "a:x", ""), "not a list of slots"),
        (lambda: choose(TWO, "a:", ""), "not a list of slots"),
        (lambda: choose(TWO, "a@a:1", ""), "appears twice"),
        (lambda: choose(TWO, "", "a@b"), "no host or slot is left"),
        (lambda: first_hosts(TWO, 3, None), "the hostfile has fewer hosts"),
        (lambda: first_hosts(TWO, None, 3), "b has fewer slots"),
        (lambda: own_plan(plans(), ["c"], None), "this host is not in the hostfile: got c, expected a or b"),
        (lambda: own_plan(plans(), ["a", "b"], None), "under several names"),
        (lambda: own_plan(plans(), ["a"], 2), "no host has this number: got 2, expected 0 to 1"),
        (lambda: own_plan(plans(), ["a"], -1), "no host has this number"),
        (lambda: parse_exports("export A"), ".deepspeed_env:1: not an environment line"),
        (lambda: put(Ask(slots=3), gpus=2), "more ranks than GPUs: got 3, expected at most 2"),
        (lambda: put(Ask(slots=-1)), "at least one rank"),
        (lambda: put(Ask(num_nodes=2)), "several hosts need a hostfile"),
        (lambda: put(Ask(nnodes="2")), "a rendezvous address"),
        (lambda: put(Ask(nnodes="2", master_addr="a")), "the number of this host is missing or out of range"),
        (lambda: put(Ask(nnodes="2", master_addr="a", node_rank=2)), "the number of this host is missing or out of range: got 2, expected 0 to 1"),
        (lambda: put(Ask(nnodes="1:2")), "a range of hosts needs --rdzv-endpoint"),
        (lambda: put(Ask(nnodes="2", master_addr="a", node_rank=0, include="a")), "cannot be combined with --nnodes"),
        (lambda: put(Ask(hostfile="c slots=1\nd slots=1")), "this host is not in the hostfile"),
        (lambda: from_slurm({**SLURM, "SLURM_NTASKS": "24"}), "several tasks per host"),
        (lambda: from_slurm({**SLURM, "SLURM_NTASKS": "24"}), "got 24, expected 3 "),
        (lambda: from_slurm({**SLURM, "SLURM_NTASKS": "24"}), "--ntasks-per-node=1"),
        (lambda: check_slots(8, HostDevices(64, 2), "--slots"), "--slots: more ranks than GPUs: got 8, expected at most 2 "),
        (lambda: check_slots(8, HostDevices(64, 2), "--slots"), "Use --slots 2"),
        (lambda: check_slots(0, HostDevices(1, 0)), "at least one rank"),
        *((lambda text=text: first_host(text), "not a list of hosts") for text in ("", "a[", "a]", "a[]", "a[x]", "a[[1]]", ",b")),
    ],
)  # fmt: skip
def test_refusals(ask: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ask()


def test_slurm():
    assert from_slurm(SLURM, 29500) == RendezvousSpec("3", 1, "gpu07", 29500, run_id="17")
    step = {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    # the step, not the whole job
    assert from_slurm(step, 29500) == RendezvousSpec("2", 1, "gpu08", 29500, run_id="17")
    for alone in ({}, {"SLURM_JOB_ID": "17"}, {**SLURM, "SLURM_NNODES": "1"}):
        assert from_slurm(alone) is None
    assert from_slurm({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "7"}) == RendezvousSpec("3", 1, "x", 7, run_id="17")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu[01-03,7],login", "gpu01"),
        ("a", "a"),
        ("a,b.example", "a"),
        ("n[098-101]x", "n098x"),
        ("r[1-2]n[1-2]", "r1n1"),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str):
    assert first_host(text) == host


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("3", 1), ("0,1,2,3,4,5", 4), ("GPU-1f,GPU-2e", 2)]
)
def test_gpus(visible: str | None, gpus: int, tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_devices(env, tmp_path).gpus == gpus


def test_what_a_host_offers():
    check_slots(8, HostDevices(cores=2, gpus=0))  # more ranks than cores are fine
    check_slots(2, HostDevices(cores=2, gpus=2))
    for slots, cores, threads in ((1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1)):
        assert threads_per_rank(slots, HostDevices(cores, 0)) == threads
    assert interface_towards("no such host") is None
    if sys.platform == "linux":
        assert interface_towards("127.0.0.1") == loopback() == "lo"


def test_what_is_missing_is_filled_in_and_what_is_set_stands():
    env = rank_environment({"A": "1", "OMP_NUM_THREADS": "7"}, threads=2, interface="lo")
    assert (env["A"], env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"]) == ("1", "7", "lo")
    assert rank_environment({}, threads=2, interface=None)["OMP_NUM_THREADS"] == "2"
    assert rank_environment({"MALLOC_TRIM_THRESHOLD_": "9"}, threads=2, interface=None)["MALLOC_TRIM_THRESHOLD_"] == "9"
    assert int(rank_environment({}, threads=2, interface=None)["MALLOC_TRIM_THRESHOLD_"]) > 2**27
    assert "GLOO_SOCKET_IFNAME" not in rank_environment({}, threads=2, interface=None)


def test_a_rank_may_start_a_run_of_its_own():
    env = rank_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y"}, threads=1, interface=None
    )
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(env)
