"""Loading kernels: what a driver may say to one, and what is tried then."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.emulated_cuda import Emulator
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime

X = torch.device("cpu")  # of the emulator, where nothing else is said


def test_a_full_gpu_makes_room_once(emulator: Emulator) -> None:
    """torch keeps what a first forward and backward took; the driver needs a little of it for a kernel's code."""
    made: list[bool] = []
    backend = emulator.cuda()
    backend.make_room = lambda: made.append(True)
    emulator.library.refuse_loads(2, 1)
    assert backend.has(cuda_runtime.sums(), X) and made == [True] and not backend.refused
    emulator.library.refuse_loads(2, 2)
    with pytest.raises(KernelUnavailable, match="out of memory"):
        backend.has(cuda_runtime.step_control(), X)
    assert made == [True] * 2
    assert backend.has(cuda_runtime.step_control(), X)


def test_no_room_is_made_while_a_graph_is_captured(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be an operation that spoils the graph."""
    backend = emulator.cuda()
    backend.make_room = lambda: pytest.fail("made room")
    monkeypatch.setattr(cuda_runtime.CudaRuntime, "capturing", lambda self, where: True)
    emulator.library.refuse_loads(2, 1)
    with pytest.raises(KernelUnavailable, match="out of memory"):
        backend.has(cuda_runtime.sums(), X)


@pytest.mark.parametrize("status", [200, 209, 300])
def test_machine_code_that_the_driver_refuses_comes_as_ptx(gpus: Gpus, status: int) -> None:
    x, loaded = gpus.put(0, torch.ones(3000)), gpus.emulator.library.modules_loaded()
    gpus.emulator.library.refuse_loads(status, 1)
    assert gpus.back(torch.ops.zero_trial.square_sum(x)).item() == 3000.0
    assert gpus.emulator.library.modules_loaded() == loaded + 2  # of two kernels, one from its second image


def test_what_is_refused_in_every_form_is_said_of_the_best_one(gpus: Gpus) -> None:
    backend = cuda_runtime.cuda_backend().cuda
    assert backend is not None
    backend.strict = False
    gpus.emulator.library.refuse_loads(209, 2)
    assert not backend.has(cuda_runtime.sums(), torch.device("cuda", 0))
    assert backend.refused[cuda_runtime.sums()].endswith(
        "no kernel image is available for execution on the device (209)"
    )
    gpus.emulator.library.refuse_loads(999, 1)  # another error is no matter of the image
    assert not backend.has(cuda_runtime.step_control(), torch.device("cuda", 0))
    assert backend.has(cuda_runtime.copy(1, 1, True), torch.device("cuda", 0))


def test_two_threads_load_a_kernel_once(emulator: Emulator) -> None:
    backend, loaded = emulator.cuda(), emulator.library.modules_loaded()
    both = threading.Barrier(2)

    def ask(_: int) -> bool:
        both.wait(10)
        return backend.has(cuda_runtime.copy(0, 1, False), X)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [True, True]
    assert emulator.library.modules_loaded() == loaded + 1
