"""Compiling and loading every kernel, rehearsed without a driver; and what it says of kernels that
do not do as they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ops import gpu_load
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        cuda_runtime.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)


class Loads:
    """A GPU on which one kernel does not load, one has a stack, and one has half the room."""

    def usage(self, image: bytes, entry: str) -> tuple[int, int, int]:
        if entry == "zt_sum":
            raise KernelUnavailable("zt_sum: cuModuleLoadData: out of memory (2)")
        return {"zt_update": (20, 8, 8), "zt_square_sum": (64, 0, 2)}[entry]


def test_what_a_gpu_says_of_its_kernels() -> None:
    kernels = [cuda_runtime.sums(), cuda_runtime.update("ZtSgd", 0, -1, 0), cuda_runtime.square_sum(0)]
    row = gpu_load.row_of("some", kernels, 90, Loads())  # type: ignore[arg-type]
    assert row["kernels"] == 2 and row["registers"] == 64 and row["target"] == "sm_90"
    assert row["wrong"] == [
        f"{kernels[0].name}: zt_sum: cuModuleLoadData: out of memory (2)",
        f"{kernels[1].name}: 8 bytes of local memory",
    ]
    assert row["fewer_blocks"] == [f"{kernels[2].name}: 2 of 4"]
    assert 0 < row["cached_ms"] < row["cold_ms"]


def test_kernels_are_loaded_and_asked_about(gpus: Gpus) -> None:
    """By the emulated driver: the calls that a GPU gets, beginning with the image."""
    backend = cuda_runtime.cuda_backend().native
    assert backend is not None
    loads = gpu_load.Loads(backend.driver, 1)
    kernels = [cuda_runtime.sums(), cuda_runtime.update("ZtSgd", 0, -1, 0)]
    row = gpu_load.row_of("some", kernels, 129, loads)
    assert row["wrong"] == [] and row["fewer_blocks"] == [] and row["registers"] == 40 and row["kernels"] == 2
