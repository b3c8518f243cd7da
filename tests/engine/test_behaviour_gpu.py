"""The engine on a GPU: every stage and precision in one rank over NCCL, and two ranks on one GPU
over gloo, against the same engine on CPU.

Tolerance: fp32 losses differ by summation order of the products, 2e-5; 16-bit ones by two steps of
bf16 at 4, 7e-2.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models import TinyLM, make_engine, tokens
from tests.support.pool import free_port

STEPS, BATCH = 4, 8
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
Case = tuple[int, str]  # stage and precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def alone(rank: int, size: int, port: int, body: Callable[..., Any], args: tuple[Any, ...], answers: Any) -> None:
    """What a process does: one rank of a world of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        answers.put((rank, body(*args), ""))
    except BaseException as trouble:
        answers.put((rank, None, f"{type(trouble).__name__}: {trouble}"))


def on_ranks(size: int, body: Callable[..., Any], *args: Any, seconds: float = 120.0) -> list[Any]:
    """``body(*args)`` in ``size`` fresh processes; results in rank order."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    answers = context.Queue()
    started = [context.Process(target=alone, args=(rank, size, port, body, args, answers)) for rank in range(size)]
    try:
        for process in started:
            process.start()
        found = sorted(answer(answers, started, time.monotonic() + seconds) for _ in started)
    finally:
        for process in started:
            process.kill()
            process.join()
    assert not any(trouble for *_, trouble in found), [trouble for *_, trouble in found]
    return [value for _, value, _ in found]


def answer(answers: Any, started: list[Any], deadline: float) -> Any:
    """The next answer; a process that crashed is not waited for."""
    while True:
        try:
            return answers.get(timeout=1.0)
        except queue.Empty:
            crashed = [process.exitcode for process in started if process.exitcode]
            if crashed or time.monotonic() > deadline:
                raise RuntimeError(f"ranks ended with {crashed}" if crashed else "the ranks gave no answer") from None


Losses = list[float]


def train(stage: int, precision: str) -> tuple[Losses, str, str]:
    """Losses of a few steps, the optimizer's class, and the device."""
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.5, **PRECISIONS[precision]}
    engine = make_engine(TinyLM, config)
    losses = []
    for step in range(STEPS):
        share = BATCH // engine.dp_world_size
        start = engine.mpu.get_data_parallel_rank() * share
        loss = engine(tokens(step, BATCH)[start : start + share].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.optimizer is not None
    return losses, type(engine.optimizer.base).__name__, engine.device.type


def all_cases(cases: list[Case], backend: str | None, cpu: bool, ops: str) -> dict[Case, Any]:
    """What :func:`train` returns for each, or the error's text. All in one process: starting one
    costs more than training."""
    from zero_trial.comm import init_distributed

    os.environ["ZERO_TRIAL_OPS"] = ops
    if cpu:
        torch.cuda.is_available = lambda: False
    torch.backends.cuda.matmul.allow_tf32 = False
    init_distributed(dist_backend=backend, timeout=60.0)
    found: dict[Case, Any] = {}
    for case in cases:
        try:
            found[case] = train(*case)
        except Exception as trouble:
            found[case] = f"{type(trouble).__name__}: {trouble}"
    return found


def gloo_moves_cuda_tensors() -> bool:
    """Whether this torch's gloo can do what ZeRO needs between CUDA tensors."""
    import torch.distributed as dist

    from zero_trial.comm import init_distributed

    init_distributed(dist_backend="gloo", timeout=30.0)
    part, whole = torch.ones(8, device="cuda"), torch.zeros(16, device="cuda")
    try:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
    except (RuntimeError, ValueError):
        return False
    return bool(part[0] == 2.0)


def close(got: Losses, want: Losses, precision: str) -> bool:
    limit = 2e-5 if precision == "fp32" else 7e-2
    return max(abs(x - y) for x, y in zip(got, want, strict=True)) <= limit


SINGLE: list[Case] = [(stage, precision) for stage in (0, 1, 2, 3) for precision in PRECISIONS]
PAIRED: list[Case] = [(stage, "fp32") for stage in (0, 2, 3)]
Found = dict[Case, Any]


@pytest.fixture(scope="module")
def on_gpu() -> Found:
    return dict(on_ranks(1, all_cases, SINGLE, None, False, "native")[0])


@pytest.fixture(scope="module")
def on_cpu() -> Found:
    return dict(on_ranks(1, all_cases, SINGLE, "gloo", True, "auto")[0])


@pytest.fixture(scope="module")
def two_on_gpu() -> list[Found]:
    if not all(on_ranks(2, gloo_moves_cuda_tensors)):
        pytest.skip("this torch's gloo does not move CUDA tensors")
    return on_ranks(2, all_cases, PAIRED, "gloo", False, "native")


@pytest.fixture(scope="module")
def two_on_cpu() -> list[Found]:
    return on_ranks(2, all_cases, PAIRED, "gloo", True, "auto")


@pytest.mark.parametrize("case", SINGLE)
def test_one_rank_over_nccl(on_gpu: Found, on_cpu: Found, case: Case) -> None:
    assert not isinstance(on_gpu[case], str), on_gpu[case]
    losses, optimizer, device = on_gpu[case]
    assert device == "cuda" and optimizer == "FusedAdam"
    assert close(losses, on_cpu[case][0], case[1])


@pytest.mark.parametrize("case", PAIRED)
def test_two_ranks_on_one_gpu_over_gloo(two_on_gpu: list[Found], two_on_cpu: list[Found], case: Case) -> None:
    for found, wanted in zip(two_on_gpu, two_on_cpu, strict=True):
        assert not isinstance(found[case], str), found[case]
        losses, _, device = found[case]
        assert device == "cuda" and close(losses, wanted[case][0], "fp32")


def test_the_kernels_train_as_the_reference_does(on_gpu: Found) -> None:
    """The same shards, gradients and clipping; only the arithmetic's last bits differ."""
    case = (2, "bf16")
    (found,) = on_ranks(1, all_cases, [case], None, False, "reference")
    assert close(on_gpu[case][0], found[case][0], "bf16")
