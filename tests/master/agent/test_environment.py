"""Slots, ports and environment variables of a run."""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import determined as det
import pytest
import zmq
from torch.distributed import TCPStore

import zero_trial
from zero_trial.errors import ConfigError
from zero_trial.master.agent import environment as subject
from zero_trial.master.agent.environment import (
    LARGEST,
    RELOCATION,
    HeldPorts,
    StartOrder,
    check_size,
    config_variable,
    environment,
    find_devices,
    tree_of,
)
from zero_trial.master.records import Allocation, AllocationState, Invalid


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def test_slots_are_the_gpus_that_we_may_see_or_processes(gpus: Path) -> None:
    assert find_devices(None, {}, files=gpus).gpus == ("0", "1", "2", "3")
    some = find_devices(None, {"CUDA_VISIBLE_DEVICES": "2,GPU-x"}, files=gpus)
    assert some.gpus == ("2", "GPU-x") and some.kind == "cuda" and some.visible((1,)) == "GPU-x"
    assert find_devices(2, {}, files=gpus).visible((0, 1)) == "0,1"
    assert find_devices(None, {"CUDA_VISIBLE_DEVICES": ""}, files=gpus).kind == "cpu"
    found = find_devices(8, {}, cpu=True, files=gpus)
    assert (found.count, found.kind, found.visible((0, 2))) == (8, "cpu", "")
    assert find_devices(None, {}, cpu=True).count == found.cores
    for wanted in (0, -1, 5):
        with pytest.raises(ConfigError, match="--slots"):
            find_devices(wanted, {}, files=gpus)


def test_ports_that_are_held_are_given_to_nobody_else() -> None:
    """Two allocations that begin at the same moment on one node, and any other program."""
    held = [HeldPorts() for _ in range(50)]
    numbers = [int(port) for each in held for port in each.variables.values()]
    assert len(set(numbers)) == 4 * len(held)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", numbers[0]))
    for each in held:
        each.close()
    with socket.socket() as other:
        other.bind(("", numbers[0]))


def test_the_servers_of_an_allocation_listen_on_the_ports_that_are_held_for_them() -> None:
    """torch's store and ZeroMQ, as the harness opens them."""
    held = HeldPorts()
    c10d, *others = map(int, held.variables.values())
    store = TCPStore("127.0.0.1", c10d, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert TCPStore("127.0.0.1", c10d).get("key") == b"value"
    context = zmq.Context()
    for port in others:
        context.socket(zmq.PUB).bind(f"tcp://*:{port}")
    context.destroy()
    held.close()


HOST = {
    "PATH": "/bin",
    "HOME": "/h",
    "LC_ALL": "C",
    "CUDA_HOME": "/cuda",
    "CUDA_VISIBLE_DEVICES": "7",
    "DET_USER_TOKEN": "secret-of-the-user",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-cloud",
    "PYTHONPATH": "/somewhere",
}


def order(config: dict[str, Any] | None = None, **changes: Any) -> StartOrder:
    run = Allocation("1.t.2", 5, 1, "1.t", 2, AllocationState.STARTING, (0, 1), 0.0, "res", "con")
    made = StartOrder(run, config or {"a": 1}, {"lr": 0.1}, 9, 4, "uuid", "ada", "token", "http://127.0.0.1:1", "cl")
    return replace(made, **changes)


def env_of(made: StartOrder, kind: str = "cpu") -> dict[str, str]:
    return environment(made, kind, HOST, "/py/bin/python3")


def test_the_harness_finds_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    env = env_of(order()) | {"DET_AGENT_ID": "n1", "DET_SLOT_IDS": "[0, 1]"}  # as its node adds them
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    info, trial = det.ClusterInfo._from_env(), det.TrialInfo._from_env()
    found = (info.slot_ids, info.allocation_id, info.session_token, info.latest_checkpoint)
    assert found == ([0, 1], "1.t.2", "token", "uuid")
    facts = (trial.trial_id, trial.trial_seed, trial.hparams, trial._trial_run_id, trial._steps_completed)
    assert facts == (5, 9, {"lr": 0.1}, 2, 4)
    names = ("RESOURCES_ID", "CONTAINER_ID", "USER", "TASK_TYPE")
    assert [env[f"DET_{name}"] for name in names] == ["res", "con", "ada", "TRIAL"]
    assert json.loads(env["DET_EXPERIMENT_CONFIG"]) == {"a": 1, "environment": {"ports": {"trial": 1734}}}


def test_a_trial_gets_the_users_variables_and_of_the_masters_only_harmless_ones() -> None:
    env = env_of(order())
    assert not any("secret" in value for value in env.values())
    assert env["CUDA_HOME"] == "/cuda" and env["LC_ALL"] == "C"
    assert env["PATH"] == "/py/bin:/bin" and (RELOCATION / "sitecustomize.py").is_file()
    tree = str(Path(zero_trial.__file__).parents[1])
    if tree != sysconfig.get_path("purelib"):  # what the master runs from, and nothing else of its PYTHONPATH
        assert env["PYTHONPATH"] == f"{RELOCATION}{os.pathsep}{tree}"
    own = ["A=1", "B=x=y", "PYTHONPATH=/mine", "DET_TRIAL_ID=99", "DET_RUN_ROOT=/"]
    for variables in (own, {"cpu": own, "cuda": ["A=2"]}):
        config = {"environment": {"environment_variables": variables}}
        env = env_of(order(config))
        assert env["A"] == "1" and env["B"] == "x=y" and env["PYTHONPATH"].split(":")[:2] == [str(RELOCATION), "/mine"]
        assert env["DET_TRIAL_ID"] == "5"
    assert env_of(order(config), "cuda")["A"] == "2"


def test_a_folder_of_installed_packages_does_not_come_before_what_python_finds_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a virtual environment sees the packages of the interpreter below it."""
    mine, base = tmp_path / "venv", tmp_path / "usr"
    monkeypatch.setattr(site, "PREFIXES", [str(mine), str(base)])  # as with --system-site-packages
    for folder in site.getsitepackages():
        Path(folder).mkdir(parents=True, exist_ok=True)
    below = [folder for folder in site.getsitepackages() if folder.startswith(str(base))]
    (tmp_path / "link").symlink_to(below[0])
    monkeypatch.setattr(subject, "__file__", f"{below[0]}/zero_trial/master/agent/environment.py")
    assert env_of(order())["PYTHONPATH"] == str(RELOCATION)
    found = {folder: tree_of(folder) for folder in [*below, str(tmp_path / "link"), sysconfig.get_path("purelib")]}
    assert set(found.values()) == {""}, found


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_the_largest_configuration_is_the_largest_that_a_process_can_be_given(more: int, fits: bool) -> None:
    around = len(f"DET_EXPERIMENT_CONFIG={config_variable({'text': ''})}") + 1
    config = {"text": "x" * (LARGEST - around + more)}
    with nullcontext() if fits else pytest.raises(Invalid, match="too large"):
        check_size(config)
    env = {**os.environ, "DET_EXPERIMENT_CONFIG": config_variable(config)}
    if fits:
        assert subprocess.run(["true"], env=env, timeout=60).returncode == 0
    else:
        with pytest.raises(OSError, match="too long"):
            subprocess.run(["true"], env=env, timeout=60)
