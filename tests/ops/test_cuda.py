"""The ops by name: as optimizers use them, and without kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.cuda_cases import STEPS, randn, same, states
from tests.support.emulated_cuda import Emulator
from zero_trial.errors import KernelUnavailable
from zero_trial.ops import cuda, cuda_backend, plain, reference
from zero_trial.ops.optimizers import FusedAdam, FusedLamb, FusedLion, fused, lamb

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda groups: FusedAdam(groups, lr=1e-2),
    "FusedLion": lambda groups: FusedLion(groups, lr=1e-3),
    "FusedLamb": lambda groups: FusedLamb(groups, lr=1e-2, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_the_cpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two groups and shapes that are not flat; LAMB adds its sums in another order than the CPU."""
    ends = []
    for on_cuda in (False, True):
        if on_cuda:
            for module in (fused, lamb):
                monkeypatch.setattr(module, "_ops", cuda)
            monkeypatch.setattr(fused, "one_launch", lambda items: True)  # as for tensors on a GPU
        weights = [torch.nn.Parameter(randn(n, n).view(shape)) for n, shape in ((6, (2, 3)), (2100, (2100,)), (1, ()))]
        groups = [{"params": weights[:2], "weight_decay": 0.01}, {"params": weights[2:], "lr": 0.1}]
        optimizer = OPTIMIZERS[name](groups)
        emulator.library.forget()
        emulator.library.allow(0, 2**63 - 1, 1)  # the optimizer makes its own state
        for t in range(3):
            for weight in weights:
                weight.grad = randn(weight.numel(), t + 5).view(weight.shape)
            optimizer.step()
        launches = 9 if name == "FusedLamb" else 3  # of three steps; LAMB is three
        assert emulator.library.fault() == b"" and emulator.library.launch_count() == launches * on_cuda
        ends.append([*(w.detach() for w in weights), *(optimizer.state[w]["exp_avg"] for w in weights)])
    for want, got in zip(*ends, strict=True):
        assert same(got, want) or (name == "FusedLamb" and torch.allclose(got, want, rtol=1e-6, atol=1e-8))


def test_without_kernels_everything_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "cuda_backend", lambda: cuda_backend.CudaBackend(None, "no CUDA device"))
    for name, numbers in STEPS.items():
        op = name.split()[0]
        mine = [randn(40), randn(40, 1), *states(name, 40)]
        theirs = [x.clone() for x in mine]
        getattr(cuda, op)(*mine, None, None, *numbers(1, 0.5))
        getattr(plain, op)(*theirs, None, None, *numbers(1, 0.5))
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    x = randn(100)
    assert cuda.square_sum(x).item() == plain.square_sum(x).item()
    into, control = [torch.zeros(100, dtype=torch.bfloat16)], torch.zeros(3)
    cuda.copy_many_(into, [x])
    cuda.step_control_(cuda.square_sum(x), None, control, 1.0, 0.0)
    assert torch.equal(into[0], x.bfloat16()) and control[0] == pytest.approx(x.norm().item())


def test_a_kernel_that_does_not_compile_is_said_once(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = emulator.cuda()

    def refuse(kernel: object, arch: int) -> Iterator[bytes]:
        raise KernelUnavailable("update.cu does not compile: error: no such thing")

    backend.images, backend.strict = refuse, False
    monkeypatch.setattr(cuda_backend, "cuda_backend", lambda: cuda_backend.CudaBackend(backend))
    p, m, v = randn(30), torch.zeros(30), torch.zeros(30)
    want = reference.adamw(p.clone(), p.clone(), m.clone(), v.clone(), 1, weight_decay=0.1).p
    for _ in range(2):
        cuda.adam_(p, randn(30), m, v, None, None, *STEPS["adam_"](1, 1.0))
        torch.testing.assert_close(p, want)
        p, m, v = randn(30), torch.zeros(30), torch.zeros(30)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "zt_update(op=ZtAdam,gradient=0,out=-1)" in said[0] and "no such thing" in said[0]
    assert "plain torch for 1 kernels" in cuda_backend.CudaBackend(backend).describe()
