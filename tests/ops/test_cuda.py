"""The ops by name: as optimizers use them, and without kernels."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda_cases import call_of, randn, same, states
from tests.support.emulated_cuda import Emulator
from tests.support.pretended_gpus import Gpus
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda_runtime, plain, reference
from zero_trial.ops.cpu_library import Backend
from zero_trial.ops.dispatch import CUDA
from zero_trial.ops.optimizers.fused import FusedAdam, FusedLion
from zero_trial.ops.spec import OPTIMIZERS as OPTIMIZERS_OF_OPS

ops = torch.ops.zero_trial

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda groups: FusedAdam(groups, lr=1e-2),
    "FusedLion": lambda groups: FusedLion(groups, lr=1e-3),
}


N = 2 * 2048 + 77


def here_and_there(gpus: Gpus, index: int, *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [x.clone() for x in tensors], [gpus.put(index, x.clone()) for x in tensors]


def alike(gpus: Gpus, cpu: Sequence[Tensor], gpu: Sequence[Tensor]) -> bool:
    return all(same(gpus.back(x), y) for x, y in zip(gpu, cpu, strict=True))


def the_chain(p: Tensor, g: Tensor, m: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """The ops of a step: the norm, the update of one tensor and of several."""
    squares: Tensor = ops.square_sum(g)
    ops.adam_(*call_of("adam_", [p, g, m, v], out, 2, 0.7))
    halves = [list(x.split(N // 2)) for x in (p, g, m, v, out)]
    columns = [[x] * len(halves[0]) for x in (1e-3, 0.9, 0.99, 1e-8, 0.1, 3.0)]
    ops.adam_(*halves, [], [], *columns, 0.7, True)
    return squares


@pytest.mark.parametrize("index", [0, 1])
def test_a_step_from_the_op_to_the_kernels_arithmetic(gpus: Gpus, index: int) -> None:
    """The bits of the CPU, on the stream that is current there, and without a wait."""
    start = (randn(N), randn(N, 1, torch.bfloat16), randn(N, 2), randn(N, 3).abs())
    cpu, gpu = here_and_there(gpus, index, *start, torch.zeros(N, dtype=torch.bfloat16))
    assert same(gpus.back(the_chain(*gpu)), the_chain(*cpu))
    library = gpus.emulator.library
    assert alike(gpus, cpu, gpu) and library.launch_count() == 2 + 1 + 1 and gpus.waits == []
    assert library.device_of_last() == index and library.stream_of_last() == gpus.streams[index]


def test_gpus_take_turns_in_one_thread(gpus: Gpus) -> None:
    """Each launch finds its device's context, module and stream, whichever came before; the null
    stream too."""
    x = randn(N)
    there = [gpus.put(index, x.clone()) for index in (0, 1)]
    sums = []
    for index in (0, 1, 1, 0, 1, 0):
        gpus.streams[index] = 0 if len(sums) == 4 else gpus.streams[index]
        sums.append(gpus.back(ops.square_sum(there[index])).item())
        assert gpus.emulator.library.device_of_last() == index
        assert (gpus.emulator.library.stream_of_last() or 0) == gpus.streams[index]
    assert set(sums) == {ops.square_sum(x).item()}


def test_the_driver_knows_whose_stream_and_memory_it_is(gpus: Gpus) -> None:
    """That the pretence can fail: a stream of the other GPU, memory of the other GPU, an argument
    too few."""
    x, backend = gpus.put(0, randn(50)), cuda_runtime.cuda_backend().native
    assert backend is not None
    where, kernel = torch.device("cuda", 0), cuda_runtime.square_sum(0)
    sums = gpus.put(1, torch.zeros(1, dtype=torch.float64))
    assert backend.has(kernel, where)
    backend.launch(kernel, where, 1, struct.pack("2Pq", x.data_ptr(), sums.data_ptr(), 50))
    assert b"written outside: 8 bytes" in gpus.emulator.library.fault()
    gpus.emulator.library.forget()
    backend.launch(kernel, where, 1, struct.pack("2P2q", x.data_ptr(), sums.data_ptr(), 50, 0))
    assert b"arguments of another size" in gpus.emulator.library.fault()
    gpus.streams[0] = gpus.streams[1]
    with pytest.raises(KernelUnavailable, match=r"cuLaunchKernel: .*\(400\)"):
        ops.square_sum(x)
    gpus.emulator.library.forget()


def test_an_optimizer_of_a_script(gpus: Gpus) -> None:
    """FusedAdam on a GPU: one launch per step, states made there, no wait."""
    ends = []
    for index in (None, 1):
        weights = [
            torch.nn.Parameter(on(gpus, index, randn(n, n).view(shape))) for n, shape in ((6, (2, 3)), (N, (N,)))
        ]
        optimizer = FusedAdam([{"params": weights[:1], "weight_decay": 0.01}, {"params": weights[1:]}], lr=1e-2)
        before = gpus.emulator.library.launch_count()
        for t in range(3):
            for weight in weights:
                weight.grad = on(gpus, index, randn(weight.numel(), t + 5).view(weight.shape))
            optimizer.step()
        assert gpus.emulator.library.launch_count() == before + (3 if index else 0)
        ends.append([gpus.back(x) for w in weights for x in (w.detach(), optimizer.state[w]["exp_avg_sq"])])
    assert all(same(x, y) for x, y in zip(*ends, strict=True)) and gpus.waits == []


def on(gpus: Gpus, index: int | None, x: Tensor) -> Tensor:
    return x if index is None else gpus.put(index, x)


def test_without_kernels_everything_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "cuda_backend", lambda: Backend(None, "no CUDA device"))
    for row in OPTIMIZERS_OF_OPS:
        name = f"{row.name}_"
        mine = [randn(40), randn(40, 1), *states(name, 40)]
        theirs = [x.clone() for x in mine]
        CUDA[name](*call_of(name, mine, None, 1, 0.5))
        (step,), shared = plain.steps_of(row, call_of(name, theirs, None, 1, 0.5))
        plain.take_step(row, step, shared)
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    x = randn(100)
    assert CUDA["square_sum"](x).item() == plain.square_sum(x).item()


def test_a_kernel_that_does_not_compile_is_said_once(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = emulator.cuda()

    def refuse(kernel: object, arch: int) -> bytes:
        raise KernelUnavailable("update.cu failed to compile: error: no such thing")

    backend.image, backend.strict = refuse, False
    monkeypatch.setattr(cuda_runtime, "cuda_backend", lambda: Backend(backend))
    p, m, v = randn(30), torch.zeros(30), torch.zeros(30)
    want = reference.adamw(p.clone(), p.clone(), m.clone(), v.clone(), 1, weight_decay=0.1).p
    for _ in range(2):
        CUDA["adam_"](*call_of("adam_", [p, randn(30), m, v], None))
        torch.testing.assert_close(p, want)
        p, m, v = randn(30), torch.zeros(30), torch.zeros(30)
    output = [record.message for record in caplog.records]
    assert (
        len(output) == 1
        and "zt_update(op=ZtAdam,state=0,gradient=0,out=-1)" in output[0]
        and "no such thing" in output[0]
    )
    assert "plain torch for 1 kernels" in Backend(backend).describe()
