"""Compiling and loading every kernel, rehearsed without a driver; and what it says of kernels that
do not do as they should."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ops import gpu_load
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_bindings, cuda_runtime


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        cuda_bindings.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)


class Loads:
    """A GPU on which one kernel does not load, one has a stack, and one has half the room."""

    def usage(self, image: bytes, entry: str) -> tuple[int, int, int]:
        if entry == "zt_sum":
            raise KernelUnavailable("zt_sum: cuModuleLoadData: out of memory (2)")
        return {"zt_step_control": (20, 8, 8), "zt_square_sum": (64, 0, 2)}[entry]


def test_what_a_gpu_says_of_its_kernels() -> None:
    kernels = [cuda_runtime.sums(), cuda_runtime.step_control(), cuda_runtime.square_sum(0)]
    row = gpu_load.row_of("some", kernels, 90, Loads())  # type: ignore[arg-type]
    assert row["kernels"] == 2 and row["registers"] == 64 and row["target"] == "sm_90"
    assert row["wrong"] == [
        f"{kernels[0].name}: zt_sum: cuModuleLoadData: out of memory (2)",
        f"{kernels[1].name}: 8 bytes of local memory",
    ]
    assert row["fewer_blocks"] == [f"{kernels[2].name}: 2 of 4"]
    assert 0 < row["cached_ms"] < row["cold_ms"]


def test_a_newer_gpu_gets_ptx() -> None:
    row = gpu_load.row_of("some", [cuda_runtime.step_control()], 999, None)
    assert row["target"].startswith("compute_") and row["kernels"] == 1 and not row["wrong"]


def test_the_driver_is_asked_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def cuFuncGetAttribute(value: Any, attribute: int, function: ctypes.c_void_p) -> int:
            value._obj.value = {gpu_load.REGISTERS: 60, gpu_load.LOCAL: 0}[attribute]
            return 0

        @staticmethod
        def cuOccupancyMaxActiveBlocksPerMultiprocessor(value: Any, function: Any, threads: int, shared: Any) -> int:
            value._obj.value = 4
            return 0 if function.value == 77 and threads == 256 else 400

    class Driver:
        def function(self, image: bytes, entry: str, device: int) -> int:
            return 77 if device == 1 else 78

    given: Any = (Driver(), Library())
    assert gpu_load.Loads(*given, 1).usage(b"", "zt_sum") == (60, 0, 4)
    with pytest.raises(KernelUnavailable, match="MaxActiveBlocksPerMultiprocessor: error 400"):
        gpu_load.Loads(*given, 0).usage(b"", "zt_sum")


def test_all_sources_are_there() -> None:
    assert sum(map(len, gpu_load.sources().values())) == len(cuda_runtime.every_kernel())
    assert sorted(cuda_runtime.majors()) == [11, 12, 13]


def test_kernels_are_loaded_and_asked_about(gpus: Gpus) -> None:
    """By the emulated driver: the calls that a GPU gets, beginning with the image."""
    backend = cuda_runtime.cuda_backend().cuda
    assert backend is not None
    loads = gpu_load.Loads(backend.driver, gpus.emulator.library, 1)
    kernels = [cuda_runtime.sums(), cuda_runtime.step_control()]
    row = gpu_load.row_of("some", kernels, 129, loads)
    assert row["wrong"] == [] and row["fewer_blocks"] == [] and row["registers"] == 40 and row["kernels"] == 2
