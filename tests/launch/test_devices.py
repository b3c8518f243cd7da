"""Counting what a host has."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.launch.this_host import HostDevices, check_slots, count_devices, threads_per_rank


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("3", 1), ("0,1,2,3,4,5", 4), ("GPU-1f,GPU-2e", 2)]
)
def test_gpus(visible: str | None, gpus: int, tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_devices(env, tmp_path).gpus == gpus


def test_there_is_a_core(tmp_path: Path):
    assert count_devices({}, tmp_path).cores >= 1


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
