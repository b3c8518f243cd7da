"""Which CUDA kernels a process runs: chosen, compiled, cached and loaded at first use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.support.emulated_cuda import Emulator
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime
from zero_trial.ops.cpu_library import Backend, KernelCache, backend, choose
from zero_trial.ops.cuda_runtime import CompileTarget, Nvrtc, open_nvrtc


def no_driver() -> None:
    raise KernelUnavailable("no CUDA driver: libcuda.so.1 does not open")


def test_a_device_without_a_driver_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cuda_runtime, "open_driver", no_driver)
    with caplog.at_level(logging.WARNING, logger="zero_trial"):
        chosen = choose({}, "CUDA", cuda_runtime.open_cuda)
    assert chosen.native is None and "no CUDA driver" in chosen.describe()
    assert [record.message for record in caplog.records if "plain torch: no CUDA driver" in record.message]
    with pytest.raises(KernelUnavailable, match=r"ZERO_TRIAL_OPS=native: .*got no CUDA driver"):
        choose({"ZERO_TRIAL_OPS": "native"}, "CUDA", cuda_runtime.open_cuda)


def test_kernels_are_compiled_once_per_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, str]] = []

    def compile_(self: Nvrtc, name: str, source: str, headers: object, options: object, target: CompileTarget) -> bytes:
        compiled.append((name, target.option))
        return b"code"

    monkeypatch.setattr(Nvrtc, "compile", compile_)
    for version in ((13, 0), (13, 0), (12, 9)):
        nvrtc = Nvrtc(None, version, (80,))
        for arch in (80, 81):  # PTX for the second
            assert cuda_runtime.compiled(nvrtc, KernelCache(tmp_path), cuda_runtime.sums(), arch) == b"code"
    assert (
        compiled
        == [("square_sum.cu", option.option) for option in (CompileTarget(80), CompileTarget(80, ptx=True))] * 2
    )


def test_what_runs_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: object = object()
    for cuda in (None, opened):
        monkeypatch.setattr(cuda_runtime, "cuda_backend", lambda cuda=cuda: Backend(cuda, "no"))
        assert cuda_runtime.native_on(torch.device("cuda", 0)) == (cuda is opened)
    assert cuda_runtime.native_on(torch.device("cpu")) == (backend().native is not None)
    assert cuda_runtime.native_on(torch.device("meta")), "of a plan: it stands for a device with kernels"


@pytest.mark.gpu
def test_this_gpu_runs_them() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    chosen = choose({"ZERO_TRIAL_OPS": "native"}, "CUDA", cuda_runtime.open_cuda)
    assert chosen.native is not None and chosen.native.has(cuda_runtime.sums(), torch.device("cuda", 0))


def test_the_library_is_found_where_it_is_installed() -> None:
    try:
        nvrtc = open_nvrtc()
    except KernelUnavailable as trouble:
        pytest.skip(trouble.what)
    since = {80: (11, 0), 90: (11, 8), 100: (12, 8)}  # NVRTC's version
    assert {arch for arch in cuda_runtime.ARCHS if since[arch] <= nvrtc.version} <= set(nvrtc.archs)


def test_a_spoilt_cache_is_made_again(gpus: Gpus, kept_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short, of another kind, or empty: the next process compiles, and the one after it does
    not."""
    x = gpus.put(0, torch.ones(100))
    torch.ops.zero_trial.square_sum(x)
    files = sorted((kept_kernels / "zero_trial").glob("cuda-*.bin"))
    assert files
    for index, file in enumerate(files):
        content = file.read_bytes()
        file.write_bytes((content[: len(content) // 2], b"\x7fELF" + content, b"")[index % 3])
    compile_, compiled = Nvrtc.compile, list[str]()
    monkeypatch.setattr(
        Nvrtc, "compile", lambda self, name, *rest: (compiled.append(name), compile_(self, name, *rest))[1]
    )
    for more in (True, False):
        compiled.clear()
        chosen = choose({"XDG_CACHE_HOME": str(kept_kernels)}, "CUDA", cuda_runtime.open_cuda)
        monkeypatch.setattr(cuda_runtime, "cuda_backend", lambda chosen=chosen: chosen)
        assert gpus.back(torch.ops.zero_trial.square_sum(x)).item() == 100.0 and bool(compiled) == more


X = torch.device("cpu")  # of the emulator, unless a test says otherwise


def test_a_full_gpu_makes_room_once(emulator: Emulator) -> None:
    """torch keeps what a first forward and backward took; the driver needs a little of it for a
    kernel's code."""
    made: list[bool] = []
    backend = emulator.cuda()
    backend.make_room = lambda: made.append(True)
    emulator.library.refuse_loads(2, 1)
    assert backend.has(cuda_runtime.sums(), X) and made == [True] and not backend.refused
    emulator.library.refuse_loads(2, 2)
    with pytest.raises(KernelUnavailable, match="out of memory"):
        backend.has(cuda_runtime.square_sum(0), X)
    assert made == [True] * 2 and backend.has(cuda_runtime.square_sum(0), X)


def test_what_the_driver_refuses_is_reported(emulator: Emulator) -> None:
    backend = emulator.cuda()
    backend.strict = False
    emulator.library.refuse_loads(209, 1)
    assert not backend.has(cuda_runtime.sums(), X)
    assert backend.refused[cuda_runtime.sums()].endswith(
        "no kernel image is available for execution on the device (209)"
    )
    assert backend.has(cuda_runtime.square_sum(0), X)
