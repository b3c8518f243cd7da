"""The CUDA driver and compiler: what is opened, what they answer, and which errors they report."""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Callable

import pytest

from tests.support import emulated_cuda
from tests.support.emulated_cuda import Bindings, Emulator
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime
from zero_trial.ops.cuda_runtime import CompileTarget, Driver, Nvrtc


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    made = emulated_cuda.make(tmp_path_factory.mktemp("driver"))
    made.build([cuda_runtime.sums()])
    return made


def test_load_and_launch(emulator: Emulator) -> None:
    driver = Driver(Bindings(emulator.library))
    image = str(emulator.built[cuda_runtime.sums()]).encode()
    function = driver.function(image, "zt_sum", 0)
    emulator.library.forget()
    driver.launch(function, 0, 3, 0, struct.pack("2Pq", 0, 0, 0))  # three blocks with nothing to do
    assert emulator.library.launch_count() == 1 and emulator.library.blocks_of_last() == 3
    assert emulator.library.contexts_pushed() == 0  # every push has its pop
    assert emulator.library.fault() == b""


def test_refusals_are_quoted_and_leave_no_context(emulator: Emulator) -> None:
    driver = Driver(Bindings(emulator.library))
    image = str(emulator.built[cuda_runtime.sums()]).encode()
    with pytest.raises(KernelUnavailable, match=r"cuModuleLoadData: device kernel image is invalid \(200\)"):
        driver.function(b"no image", "zt_x", 0)
    with pytest.raises(KernelUnavailable, match=r"cuModuleGetFunction: named symbol not found \(500\)"):
        driver.function(image, "nothing", 0)
    with pytest.raises(KernelUnavailable, match=r"cuLaunchKernel: unknown error \(1\)"):
        driver.launch(driver.function(image, "zt_sum", 0), 0, 0, 0, b"")
    with pytest.raises(KernelUnavailable, match="cuDeviceGet"):
        driver.function(image, "zt_sum", 5)
    assert emulator.library.contexts_pushed() == 0


SOURCE = '#include "one.h"\nextern "C" __global__ void zt_one(float* x) { *x = ONE; }'


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return cuda_runtime.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(f"{trouble.what}. pip install 'zero_trial[cuda-check]'")


def test_machine_code_without_a_gpu(nvrtc: Nvrtc) -> None:
    image = nvrtc.compile("one.cu", SOURCE, {"one.h": "#define ONE 1.0f"}, ["--std=c++17"], CompileTarget(80))
    assert image.startswith(b"\x7fELF") and b"zt_one" in image


def test_ptx_for_a_device_that_it_does_not_know(nvrtc: Nvrtc) -> None:
    known = max(nvrtc.archs)
    assert nvrtc.target(known) == CompileTarget(known)
    target = nvrtc.target(known + 7)
    assert target == CompileTarget(known, ptx=True) and target.option == f"--gpu-architecture=compute_{known}"
    image = nvrtc.compile("one.cu", SOURCE, {"one.h": "#define ONE 1.0f"}, [], target)
    assert b".entry zt_one" in image and f".target sm_{known}".encode() in image


def test_a_device_older_than_all_it_knows(nvrtc: Nvrtc) -> None:
    with pytest.raises(KernelUnavailable, match=r"compute capability 5\.2, expected 8\.0 or newer"):
        dataclasses.replace(nvrtc, archs=(80, 90)).target(52)


def test_the_compilers_complaint_is_quoted(nvrtc: Nvrtc) -> None:
    with pytest.raises(
        KernelUnavailable, match=r"one\.cu failed to compile: one\.cu\(2\): error: .*ONE.* is undefined"
    ):
        nvrtc.compile("one.cu", SOURCE, {"one.h": ""}, [], CompileTarget(80))
    with pytest.raises(KernelUnavailable, match="failed to compile"):
        nvrtc.compile("one.cu", "", {}, ["--no-such-option"], CompileTarget(80))


@pytest.mark.parametrize("open_", [cuda_runtime.open_driver, cuda_runtime.open_nvrtc])
def test_without_the_bindings_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, open_: Callable[[], object]
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(KernelUnavailable, match=r"no cuda\.bindings: ") as caught:
        open_()
    assert "pip install cuda-bindings" in caught.value.fix
