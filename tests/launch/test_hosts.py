"""The plan of several hosts, as tables."""

from __future__ import annotations

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.hosts import HostPlan, RendezvousSpec, own_plan, parse_exports, plan_hosts, ssh_command

PRESENT = {"a": [0, 1, 2, 3], "b": [0, 1]}


def test_hosts_are_numbered_in_order_and_meet_at_the_first():
    plans = plan_hosts({"a": [1, 3], "b": [0, 1]}, PRESENT, "", 7000)
    assert plans == [
        HostPlan("a", 2, RendezvousSpec("2", 0, "a", 7000), visible=(1, 3)),
        HostPlan("b", 2, RendezvousSpec("2", 1, "a", 7000)),  # all of its slots: nothing is hidden
    ]


def test_one_host_needs_no_meeting():
    assert plan_hosts({"b": [0, 1]}, PRESENT, "", 7000) == [HostPlan("b", 2, RendezvousSpec())]


def test_the_address_can_be_another():
    assert [p.rendezvous.master_addr for p in plan_hosts(PRESENT, PRESENT, "10.0.0.9", 1)] == ["10.0.0.9", "10.0.0.9"]


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
