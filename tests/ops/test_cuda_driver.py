"""The driver is asked for the right things in the right order, and its refusals are quoted. On the emulator's driver."""

from __future__ import annotations

import struct

import pytest

from tests.support import emulated_cuda
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_kernels
from zero_trial.ops.cuda_driver import Driver, open_driver


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    made = emulated_cuda.make(tmp_path_factory.mktemp("driver"))
    made.build([cuda_kernels.sums()])
    return made


def test_load_and_launch(emulator: Emulator) -> None:
    driver = Driver(emulator.library)
    image = str(emulator.built[cuda_kernels.sums()]).encode()
    function = driver.function(image, "zt_sum", 0)
    emulator.library.forget()
    driver.launch(function, 0, 3, 0, struct.pack("2Pq", 0, 0, 0))  # three blocks with nothing to do
    assert emulator.library.launch_count() == 1 and emulator.library.blocks_of_last() == 3
    assert emulator.library.contexts_pushed() == 0  # every push has its pop
    assert emulator.library.mode_of_captures() == 0  # relaxed while loading, and as it was again
    assert emulator.library.fault() == b""


def test_refusals_are_quoted_and_leave_no_context(emulator: Emulator) -> None:
    driver = Driver(emulator.library)
    image = str(emulator.built[cuda_kernels.sums()]).encode()
    with pytest.raises(KernelUnavailable, match=r"zt_x: cuModuleLoadData: device kernel image is invalid \(200\)"):
        driver.function(b"no image", "zt_x", 0)
    with pytest.raises(KernelUnavailable, match=r"nothing: cuModuleGetFunction: named symbol not found \(500\)"):
        driver.function(image, "nothing", 0)
    with pytest.raises(KernelUnavailable, match=r"cuLaunchKernel: unknown error \(1\)"):
        driver.launch(driver.function(image, "zt_sum", 0), 0, 0, 0, b"")
    with pytest.raises(KernelUnavailable, match="cuDeviceGet"):
        driver.function(image, "zt_sum", 5)
    assert emulator.library.contexts_pushed() == 0 and emulator.library.mode_of_captures() == 0


def test_no_driver() -> None:
    with pytest.raises(KernelUnavailable, match=r"no CUDA driver: libnone\.so and libnil\.so do not open"):
        open_driver(("libnone.so", "libnil.so"))
