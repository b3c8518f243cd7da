"""Fixtures: the emulator of CUDA kernels, made once for all tests, fake GPUs on top of it, and what
results are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import emulated_cuda, pretended_gpus
from tests.support.emulated_cuda import Emulator
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cpu_library as cpu_library_ops
from zero_trial.ops import cuda_runtime
from zero_trial.ops.spec import BF16, FP16, FP32, NONE


def folder_of_run(factory: pytest.TempPathFactory, name: str) -> Path:
    """Make a folder that all workers of one test run share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Kernels are compiled when they are loaded, or asked for together."""
    return emulated_cuda.make(folder_of_run(tmp_path_factory, "cuda"))


@pytest.fixture(scope="session")
def cuda_built(cuda_driver: Emulator) -> Emulator:
    """With the kernels that most tests of the ops run, two compilers at a time."""
    kinds = ((FP32, BF16), (BF16, BF16), (FP16, FP16))
    cuda_driver.build(
        [
            *(
                cuda_runtime.update(op, g, out, FP32)
                for op in (op.struct for op in cuda_runtime.OPTIMIZERS)
                for g, out in kinds
            ),
            *(cuda_runtime.update("ZtAdam", g, out, FP32) for g, out in ((FP32, FP32), (FP32, NONE), (BF16, NONE))),
            *(cuda_runtime.square_sum(stored) for stored in cuda_runtime.STORED),
            cuda_runtime.sums(),
        ]
    )
    return cuda_driver


@pytest.fixture(scope="session")
def cpu_library() -> cpu_library_ops.CPULibrary:
    """The CPU's kernels, whatever ZERO_TRIAL_OPS says, from the cache of this machine."""
    try:
        return cpu_library_ops.open_native(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(f"nothing to compare with: {trouble.what}")


@pytest.fixture
def cpu_kernels(cpu_library: cpu_library_ops.CPULibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """What results are compared with."""
    monkeypatch.setattr(cpu_library_ops, "backend", lambda: cpu_library_ops.Backend(cpu_library))


@pytest.fixture
def emulator(cuda_built: Emulator, cpu_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    emulated_cuda.install(cuda_built, monkeypatch)
    return cuda_built


@pytest.fixture(scope="session")
def kept_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are kept, so that each is compiled once."""
    return folder_of_run(tmp_path_factory, "kept")


@pytest.fixture
def gpus(
    cuda_driver: Emulator, cpu_kernels: None, monkeypatch: pytest.MonkeyPatch, kept_kernels: Path
) -> Iterator[Gpus]:
    """A Hopper, and one newer than the compiler."""
    try:
        cuda_runtime.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(f"{trouble.what}. pip install 'zero_trial[cuda-check]'")
    made = Gpus(cuda_driver, (90, 129))
    chosen = pretended_gpus.install(
        made, monkeypatch, {"ZERO_TRIAL_OPS": "native", "XDG_CACHE_HOME": str(kept_kernels)}
    )
    assert chosen.native is not None and "NVRTC" in chosen.describe()
    with made:
        yield made
    cuda_runtime.device_of.cache_clear()
    assert cuda_driver.library.fault() == b"" and cuda_driver.library.contexts_pushed() == 0


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set how many threads of torch compute, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
