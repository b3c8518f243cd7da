"""The engine on a GPU: every stage and precision in one rank over NCCL, and two ranks on one GPU
over gloo, against the same engine on CPU.

Tolerance: fp32 losses differ by summation order of the products, 2e-5; 16-bit ones by two steps of
bf16 at 4, 7e-2.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.support.fresh_ranks import run_fresh
from tests.support.models import TinyLM, make_engine, tokens

STEPS, BATCH = 4, 8
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
Case = tuple[int, str]  # stage and precision
Losses = list[float]
Found = dict[Case, Any]  # what train() returns, or the error's text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_ranks(size: int, *args: Any) -> list[Found]:
    """:func:`all_cases` on fresh ranks; their results in rank order."""
    ended = run_fresh(size, all_cases, *args, limit=120.0)
    assert not any(each.error or each.code for each in ended), ended
    return [each.value for each in ended]


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


def all_cases(cases: list[Case], backend: str | None, cpu: bool, ops: str) -> Found:
    """All in one process: starting one costs more than training."""
    from zero_trial.comm import init_distributed

    os.environ["ZERO_TRIAL_OPS"] = ops
    if cpu:
        torch.cuda.is_available = lambda: False
    torch.backends.cuda.matmul.allow_tf32 = False
    init_distributed(dist_backend=backend, timeout=60.0)
    found: Found = {}
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


@pytest.fixture(scope="module")
def on_gpu() -> Found:
    return on_ranks(1, SINGLE, None, False, "native")[0]


def compare(found: Found, wanted: Found, cases: list[Case]) -> None:
    for case in cases:
        assert not isinstance(found[case], str), found[case]
        losses, optimizer, device = found[case]
        assert device == "cuda" and optimizer == "FusedAdam" and close(losses, wanted[case][0], case[1]), case


def test_one_rank_over_nccl(on_gpu: Found) -> None:
    compare(on_gpu, on_ranks(1, SINGLE, "gloo", True, "auto")[0], SINGLE)


def test_two_ranks_on_one_gpu_over_gloo() -> None:
    if not all(each.value for each in run_fresh(2, gloo_moves_cuda_tensors)):
        pytest.skip("this torch's gloo does not move CUDA tensors")
    got, wanted = on_ranks(2, PAIRED, "gloo", False, "native"), on_ranks(2, PAIRED, "gloo", True, "auto")
    for each, other in zip(got, wanted, strict=True):
        compare(each, other, PAIRED)


def test_the_kernels_train_as_the_reference_does(on_gpu: Found) -> None:
    """The same shards, gradients and clipping; only the arithmetic's last bits differ."""
    case = (2, "bf16")
    (found,) = on_ranks(1, [case], None, False, "reference")
    assert close(on_gpu[case][0], found[case][0], "bf16")
