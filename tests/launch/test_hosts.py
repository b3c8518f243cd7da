"""The hosts of a run, and this host, as tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import (
    HostDevices,
    HostPlacement,
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
    ("text", "message"),
    [
        ("a slots=4\nb\n", "hostfile:2: not a host line: got 'b', expected host slots=N"),
        ("a slots=x", "hostfile:1: not a host line"),
        ("a slots=1\na slots=2", "hostfile:2: the host is named twice: got a"),
        ("a slots=0", "hostfile:1: a host needs at least one slot"),
        ("# nothing\n", "hostfile: the hostfile names no host"),
    ],
)
def test_bad_hostfiles(text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text)
    assert message in str(caught.value)


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


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "exclude each other"),
        ("c", "", "no such host in the hostfile: got 'c', expected a or b"),
        ("b:2", "", "no such slot on this host: got b:2 (slot 2), expected 0 to 1"),
        ("a:x", "", "not a list of slots"),
        ("a:", "", "not a list of slots"),
        ("a@a:1", "", "named twice"),
        ("", "a@b", "nothing is left"),
    ],
)
def test_bad_filters(include: str, exclude: str, message: str):
    with pytest.raises(ConfigError) as caught:
        choose(TWO, include, exclude)
    assert message in str(caught.value)


def test_first_hosts():
    assert first_hosts(TWO, 1, None) == {"a": [0, 1, 2, 3]}
    assert first_hosts(TWO, None, 2) == {"a": [0, 1], "b": [0, 1]}
    with pytest.raises(ConfigError, match="not so many hosts"):
        first_hosts(TWO, 3, None)
    with pytest.raises(ConfigError, match="b has not so many slots"):
        first_hosts(TWO, None, 3)


PRESENT = {"a": [0, 1, 2, 3], "b": [0, 1]}


def test_hosts_are_numbered_in_order_and_meet_at_the_first():
    plans = plan_hosts({"a": [1, 3], "b": [0, 1]}, PRESENT, "", 7000)
    assert plans == [
        HostPlan("a", 2, RendezvousSpec("2", 0, "a", 7000), visible=(1, 3)),
        HostPlan("b", 2, RendezvousSpec("2", 1, "a", 7000)),  # all of its slots: nothing is hidden
    ]


def test_which_host_is_this():
    plans = plan_hosts(PRESENT, PRESENT, "", 1)
    assert own_plan(plans, ["b", "b.example"], None).node_rank == 1
    assert own_plan(plans, ["c"], 0).host == "a"


@pytest.mark.parametrize(
    ("names", "number", "message"),
    [
        (["c"], None, "this host is not in the hostfile: got c, expected a or b"),
        (["a", "b"], None, "under several names"),
        (["a"], 2, "no host of this number: got 2, expected 0 to 1"),
        (["a"], -1, "no host of this number"),
    ],
)
def test_this_host_is_unclear(names: list[str], number: int | None, message: str):
    with pytest.raises(ConfigError) as caught:
        own_plan(plan_hosts(PRESENT, PRESENT, "", 1), names, number)
    assert message in str(caught.value)


def test_ssh_quotes_what_the_other_shell_reads():
    command = ssh_command(HostPlan("b", 2, RendezvousSpec()), ["python", "a b.py", "$x"], "/data/my runs", {"A": "1 2"})
    assert command[:5] == ["ssh", "-tt", "-o", "BatchMode=yes", "b"]
    assert command[5] == "cd '/data/my runs' && exec env A='1 2' python 'a b.py' '$x'"


def test_environment_file():
    assert parse_exports("# ours\nNCCL_DEBUG=INFO\nEMPTY=\nX=a=b\n") == {"NCCL_DEBUG": "INFO", "EMPTY": "", "X": "a=b"}
    with pytest.raises(ConfigError, match=r"\.deepspeed_env:1: not an environment line"):
        parse_exports("export A")


CPU = HostDevices(cores=4, gpus=0)
TWO_GPUS = HostDevices(cores=16, gpus=2)
FILE = "a slots=2\nb slots=2\n"


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


def test_a_hostfile_says_which_host_this_is():
    second = HostPlan("b", 2, RendezvousSpec("2", 1, "a", 29500))
    assert put(PlacementRequest(hostfile=FILE)) == HostPlacement(second)
    first = HostPlan("a", 2, RendezvousSpec("2", 0, "a", 29500))
    assert put(PlacementRequest(hostfile=FILE, spread=True), names=("a",)) == HostPlacement(first, (second,))
    assert put(PlacementRequest(hostfile=FILE, spread=True), names=("head",)) == HostPlacement(None, (first, second))


def test_a_filter_of_this_host():
    request = PlacementRequest(include="localhost:1")
    assert put(request, devices=TWO_GPUS) == HostPlacement(HostPlan("localhost", 1, RendezvousSpec(), visible=(1,)))


def test_a_slurm_step_decides_where_nothing_else_is_said():
    assert put(PlacementRequest(slots=4), SLURM) == HostPlacement(
        HostPlan("localhost", 4, RendezvousSpec("3", 1, "gpu07", 29500, run_id="17"))
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


SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}


def test_slurm():
    assert from_slurm(SLURM, 29500) == RendezvousSpec("3", 1, "gpu07", 29500, run_id="17")
    step = {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    # the step, not the whole job
    assert from_slurm(step, 29500) == RendezvousSpec("2", 1, "gpu08", 29500, run_id="17")
    assert from_slurm({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "7"}) == RendezvousSpec("3", 1, "x", 7, run_id="17")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu[01-03,7],login", "gpu01"),
        ("a", "a"),
        ("a,b.example", "a"),
        ("n[098-101]x", "n098x"),
        ("r[1-2]n[1-2]", "r1n1"),
        *((text, None) for text in ("", "a[", "a]", "a[]", "a[x]", "a[[1]]", ",b")),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str | None):
    if host is not None:
        assert first_host(text) == host
    else:
        with pytest.raises(ConfigError, match="not a list of hosts"):
            first_host(text)


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": "17"}, {**SLURM, "SLURM_NNODES": "1"}])
def test_no_slurm_or_one_host(env: dict[str, str]):
    assert from_slurm(env) is None


def test_slurm_with_a_task_per_rank_is_refused():
    with pytest.raises(ConfigError, match=r"several tasks per host.* got 24, expected 3 .*--ntasks-per-node=1"):
        from_slurm({**SLURM, "SLURM_NTASKS": "24"})


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("3", 1), ("0,1,2,3,4,5", 4), ("GPU-1f,GPU-2e", 2)]
)
def test_gpus(visible: str | None, gpus: int, tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_devices(env, tmp_path).gpus == gpus


def test_more_ranks_than_gpus_is_refused_but_not_more_than_cores():
    check_slots(8, HostDevices(cores=2, gpus=0))
    check_slots(2, HostDevices(cores=2, gpus=2))
    with pytest.raises(ConfigError, match=r"--slots: more ranks than GPUs: got 8, expected at most 2 .*Use --slots 2"):
        check_slots(8, HostDevices(cores=64, gpus=2), "--slots")
    with pytest.raises(ConfigError, match="at least one rank"):
        check_slots(0, HostDevices(1, 0))


@pytest.mark.parametrize(("slots", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1)])
def test_threads(slots: int, cores: int, threads: int):
    assert threads_per_rank(slots, HostDevices(cores, 0)) == threads


@pytest.mark.skipif(sys.platform != "linux", reason="loopback is called lo")
def test_this_host_is_reached_through_loopback():
    assert interface_towards("127.0.0.1") == loopback() == "lo"


def test_a_name_that_does_not_resolve_gives_nothing():
    assert interface_towards("no such host") is None


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
