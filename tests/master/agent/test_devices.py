"""Slots: GPUs or processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_trial.errors import ConfigError
from zero_trial.master.agent.devices import SlotDevices, find_devices


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    return tmp_path


def test_cpu_slots(tmp_path: Path) -> None:
    found = find_devices(3, {}, files=tmp_path)
    assert (found.count, found.kind, found.visible((0, 2))) == (3, "cpu", "")
    assert find_devices(None, {}, files=tmp_path).count == found.cores


def test_gpu_slots_are_those_that_we_may_see(gpus: Path) -> None:
    assert find_devices(None, {}, files=gpus).gpus == ("0", "1", "2", "3")
    some = find_devices(None, {"CUDA_VISIBLE_DEVICES": "2,GPU-x"}, files=gpus)
    assert some.gpus == ("2", "GPU-x") and some.kind == "cuda" and some.visible((1,)) == "GPU-x"
    assert find_devices(2, {}, files=gpus).visible((0, 1)) == "0,1"
    assert find_devices(None, {"CUDA_VISIBLE_DEVICES": ""}, files=gpus).kind == "cpu"
    assert find_devices(8, {}, cpu=True, files=gpus).kind == "cpu"


@pytest.mark.parametrize("wanted", [0, -1, 5])
def test_slots_that_there_are_not(gpus: Path, wanted: int) -> None:
    with pytest.raises(ConfigError, match="--slots"):
        find_devices(wanted, {}, files=gpus)


def test_threads_share_the_cores() -> None:
    assert [SlotDevices(count, cores=8).threads for count in (1, 2, 8, 16)] == [8, 4, 1, 1]
