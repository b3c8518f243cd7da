"""The emulator of CUDA kernels, made once for all tests of the ops, and what its results are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import emulated_cuda, pretended_gpus
from tests.support.emulated_cuda import Emulator
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import _native, _nvrtc, cuda_backend, cuda_kernels, library
from zero_trial.ops.cuda_kernels import BF16, FP16, FP32, NONE


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    emulator = emulated_cuda.make(tmp_path_factory.mktemp("cuda"))
    kinds = ((FP32, BF16), (BF16, BF16), (FP16, FP16))
    emulator.build(
        [
            *(cuda_kernels.update(op, g, out) for op in cuda_kernels.OPTIMIZERS for g, out in kinds),
            *(cuda_kernels.update("ZtAdam", g, out) for g, out in ((FP32, FP32), (FP32, NONE), (BF16, NONE))),
            *(cuda_kernels.lamb("zt_lamb_moments", g, NONE) for g, _ in kinds),
            *(cuda_kernels.lamb("zt_lamb_apply", FP32, out) for out in (NONE, BF16, FP16)),
            cuda_kernels.lamb("zt_lamb_squares", FP32, NONE),
            *(cuda_kernels.square_sum(stored) for stored in cuda_kernels.STORED),
            *(cuda_kernels.sums(), cuda_kernels.step_control()),
            *(
                cuda_kernels.copy(*kind)
                for kind in ((0, 1, False), (1, 0, True), (2, 0, True), (1, 1, True), (0, 2, True))
            ),
        ]
    )
    return emulator


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels, whatever ZERO_TRIAL_OPS says."""
    try:
        opened = _native.open_native(os.environ)
    except KernelUnavailable as trouble:
        pytest.skip(f"nothing to compare with: {trouble.what}")
    monkeypatch.setattr(library, "backend", lambda: _native.Backend(opened))


@pytest.fixture
def emulator(built: Emulator, native: None, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    emulated_cuda.install(built, monkeypatch)
    return built


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are kept, so that each is compiled once."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def gpus(built: Emulator, native: None, monkeypatch: pytest.MonkeyPatch, kept: Path) -> Iterator[Gpus]:
    """A Hopper, and one newer than the compiler."""
    try:
        _nvrtc.open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(f"{trouble.what}. pip install 'zero_trial[cuda-check]'")
    made = Gpus(built, (90, 129))
    chosen = pretended_gpus.install(made, monkeypatch, {"ZERO_TRIAL_OPS": "native", "XDG_CACHE_HOME": str(kept)})
    assert chosen.cuda is not None and "NVRTC" in chosen.describe()
    with made:
        yield made
    cuda_backend.device_of.cache_clear()
    assert built.library.fault() == b"" and built.library.contexts_pushed() == 0
